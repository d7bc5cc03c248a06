"""Tiny scoring models in folders, with tokenizers that know any text. Everything is a function of its arguments."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.rounding import rounding

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
WORDS = ["10", "Yes", "No", "\u01201", "\u0120Yes", "\u0120No"]  # single tokens; U+0120 stands for a space
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LARGEST = 10.0  # no logit of these models is larger
LABELS = {0: "NEGATIVE", 1: "POSITIVE", 2: "MIXED"}
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}


def rounding_of(tokens: int = 64) -> float:
    """How far a logit or log-probability of one of these models may move with the batch and the processor: in each of
    two layers four products over a width of 16 and one over up to 64, two norms, the scores and the values of up to
    `tokens` keys; then a norm, the head and a softmax over fewer than 300 tokens."""
    return rounding(2 * (4 * 16 + 64 + 2 * 16 + 2 * tokens) + 2 * 16 + 300, LARGEST)


def share_of(tokens: int = 64) -> float:
    """The same of a probability or an average over probabilities: a softmax moves by at most half of what its logits
    do."""
    return rounding_of(tokens) / 2


def byte_pairs(pair: bool, longest: int, template: bool = False) -> PreTrainedTokenizerFast:
    """Bytes and the WORDS; with `pair` [CLS] and [SEP] around one text or two, else nothing."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        steps = [(word[:end], word[end]) for end in range(1, len(word))]
        for one, other in [(word[0], word[1:])] if word[1:] in vocabulary else steps:
            vocabulary.append(one + other)
            merges.append((one, other))
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    names = {"pad_token": "[PAD]"}
    if pair:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        names |= {"bos_token": "<s>", "eos_token": "</s>"}
    inputs = ["input_ids", *(["token_type_ids"] if pair else []), "attention_mask"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, model_input_names=inputs, **names
    )
    if template:
        made.chat_template = TEMPLATE
    return made


def scattered(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """Large random weights from numpy's generator, the same everywhere; norms around 1."""
    random = np.random.RandomState(seed)
    for name, parameter in sorted(model.named_parameters()):
        centre = 1.0 if "orm" in name and name.endswith("weight") else 0.0
        values = centre + scale * random.standard_normal(tuple(parameter.shape))
        parameter.data = torch.tensor(values, dtype=torch.float32)
    return model.eval()


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bert_config(longest: int = 64, **fields: Any) -> BertConfig:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    size = len(byte_pairs(True, longest))
    return BertConfig(vocab_size=size, max_position_embeddings=longest, pad_token_id=0, **{**small, **fields})


def encoder(folder: Path, seed: int = 0, longest: int = 64) -> str:
    return saved(scattered(BertModel(bert_config(longest)), 0.3, seed), byte_pairs(True, longest), folder)


def classifier(folder: Path, labels: dict[int, str] = LABELS, seed: int = 0, longest: int = 64, **fields: Any) -> str:
    config = bert_config(longest, id2label=labels, label2id={name: id for id, name in labels.items()}, **fields)
    return saved(scattered(BertForSequenceClassification(config), 0.5, seed), byte_pairs(True, longest), folder)


def scalar(folder: Path, seed: int = 0, template: bool = True, padding: int | None = None, longest: int = 256) -> str:
    """A Llama with one output, whose configuration names no padding unless asked to."""
    config = LlamaConfig(
        vocab_size=len(byte_pairs(False, longest)),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        num_labels=1,
        pad_token_id=padding,
    )
    model = scattered(LlamaForSequenceClassification(config), 0.3, seed)
    return saved(model, byte_pairs(False, longest, template), folder)


WRONG_OR_RIGHT = {0: "wrong", 1: "right"}


def steps(
    folder: Path, seed: int = 0, longest: int = 256, id2label: dict[int, str] = WRONG_OR_RIGHT, **facts: Any
) -> str:
    """A Llama that judges each token as wrong or right; `facts` are what lmgym would have written about it."""
    config = LlamaConfig(
        vocab_size=len(byte_pairs(False, longest)),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        id2label=id2label,
        label2id={name: id for id, name in id2label.items()},
        **({"lmgym": facts} if facts else {}),
    )
    return saved(scattered(LlamaForTokenClassification(config), 0.3, seed), byte_pairs(False, longest), folder)


def gpt2_config(longest: int, **fields: Any) -> GPT2Config:
    size = len(byte_pairs(False, longest))
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, **fields}
    return GPT2Config(vocab_size=size, n_positions=longest, bos_token_id=5, eos_token_id=6, pad_token_id=0, **small)


def causal(folder: Path, seed: int = 0, longest: int = 512, template: bool = True) -> str:
    model = scattered(GPT2LMHeadModel(gpt2_config(longest)), 0.3, seed)
    return saved(model, byte_pairs(False, longest, template), folder)


def constant(folder: Path, logits: dict[str, float], longest: int = 2048, template: bool = True) -> str:
    """A GPT-2 that says the same of every next token: these logits for the named tokens, and 0 for the others."""
    tokenizer = byte_pairs(False, longest, template)
    model = GPT2LMHeadModel(gpt2_config(longest, n_embd=2, n_layer=1, n_head=1, tie_word_embeddings=False))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.transformer.ln_f.bias.data[0] = 1.0  # so the last hidden state is (1, 0) everywhere
    for token, value in logits.items():
        model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(token), 0] = value
    return saved(model.eval(), tokenizer, folder)
