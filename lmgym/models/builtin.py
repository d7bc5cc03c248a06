"""Built-in models and tokenizers: small, from scratch, a function of the seed; nothing is downloaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest

BUILTIN = "builtin:tiny"
PREFIX = "builtin:"
SPECIAL = ["<pad>", "<bos>", "<eos>"]  # ids 0, 1 and 2 of every built-in tokenizer
DERIVED = ("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings")  # T5Config sets these itself


@dataclass(frozen=True)
class Family:
    """A built-in model: its classes, and the fields of its configuration that are not the class's own defaults."""

    config: type[Any]
    model: Callable[[Any], PreTrainedModel]
    fields: Mapping[str, Any]


# Dropout is 0 throughout: what the sampler drew and what the update scores must be the same distribution.
MODELS = {
    BUILTIN: Family(
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
    ),
    "builtin:tiny_gpt2": Family(
        GPT2Config,
        GPT2LMHeadModel,
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "activation_function": "gelu_pytorch_tanh",  # GPT-2's own gelu_new in one kernel
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "builtin:tiny_t5": Family(
        T5Config,
        T5ForConditionalGeneration,
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,  # the padding, as T5 has it
        },
    ),
    "builtin:tiny_bart": Family(
        BartConfig,
        BartForConditionalGeneration,
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_position_embeddings": 512,
            "dropout": 0.0,
            "decoder_start_token_id": 1,  # BART's is its end of sequence, which would end an answer before it begins
            "forced_bos_token_id": None,
            "forced_eos_token_id": None,
        },
    ),
}


def is_builtin(name: str) -> bool:
    """Whether a model's or tokenizer's name is one of this module (or means to be: builtin_model refuses unknown ones).

    Example:
        >>> is_builtin("builtin:tiny_t5"), is_builtin("gpt2")
        (True, False)
    """
    return name.startswith(PREFIX)


def builtin_model(
    name: str, tokenizer: PreTrainedTokenizerFast, architecture: Mapping[str, Any], seed: int
) -> PreTrainedModel:
    """A random model of under a million parameters, a function of its arguments; fp32, on the cpu.

    builtin:tiny is a Llama, builtin:tiny_gpt2 a GPT-2, builtin:tiny_t5 a T5, builtin:tiny_bart a BART. `architecture`
    overrides fields of that model's configuration, by the names that its configuration gives them. Raises LmgymError
    for an unknown name, an unknown field, and values that do not go together.

    Example:
        >>> builtin_model("builtin:tiny_gpt2", builtin_tokenizer("builtin:numbers"), {"n_embd": 32}, seed=0)
    """
    if name not in MODELS:
        raise LmgymError(f"policy.model: there is no '{name}'; {suggest(name, MODELS)}")
    family = MODELS[name]
    valid = set(family.config().to_dict()) - set(DERIVED if family.config is T5Config else ())
    for key in architecture:
        if key not in valid:
            raise LmgymError(f"unknown key 'policy.architecture.{key}'; {suggest(str(key), valid)}")
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **family.fields,
        **architecture,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.key(seed, "initial weights") & 0x7FFFFFFFFFFFFFFF)
        try:
            return family.model(family.config(**fields))
        except Exception as error:  # the library's own kinds, for sizes that do not go together
            raise LmgymError(f"policy.architecture: {' '.join(str(error).split())[:300]}") from error


def builtin_tokenizer(name: str = "builtin:bytes") -> PreTrainedTokenizerFast:
    """builtin:bytes or builtin:numbers; LmgymError for another name.

    Example:
        >>> builtin_tokenizer("builtin:numbers")("7 99")["input_ids"]
        [1, 10, 102]
    """
    if name not in TOKENIZERS:
        raise LmgymError(f"policy.tokenizer: there is no '{name}'; {suggest(name, TOKENIZERS)}")
    return TOKENIZERS[name]()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: ids 0 pad, 1 BOS, 2 EOS, then the 256 bytes; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPECIAL + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(**_special(tokenizer), model_max_length=512)


class NumberTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose words are the numbers 0 to 99 (ids 3 to 102), apart by white space; 0 pad, 1 BOS, 2 EOS.

    Decoding joins by single spaces. There is no token for anything else: encoding another word raises LmgymError.
    (One read back from a folder is transformers' own class with the same ids; it refuses such a word in other terms.)

    Example:
        >>> number_tokenizer().decode([10, 102])
        '7 99'
    """

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._encode_plus(*args, **kwargs)
        except Exception as error:  # tokenizers raises no narrower kind
            if "UNK" not in str(error):
                raise
            text = kwargs.get("text", args[0] if args else "")
            words = (text if isinstance(text, str) else " ".join(map(str, text))).split()
            other = next((word for word in words if word not in self.get_vocab()), "")
            raise LmgymError(
                f"builtin:numbers knows the whole numbers 0 to 99 and no other word, and the text has {other!r}; "
                "take builtin:bytes for any text"
            ) from error


# The name is written into a saved model, where ours means nothing to whoever reads it.
NumberTokenizer.__name__ = PreTrainedTokenizerFast.__name__


def number_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of numbers: 103 ids, so that a model from scratch finds increasing numbers within minutes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL, *map(str, range(100))]
    tokenizer = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return NumberTokenizer(**_special(tokenizer), model_max_length=512)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "builtin:bytes": byte_tokenizer,
    "builtin:numbers": number_tokenizer,
}


def _special(tokenizer: Any) -> dict[str, Any]:
    """Teach it the special tokens and BOS in front; the keyword arguments that wrap it."""
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    pad, bos, eos = SPECIAL
    return {"tokenizer_object": tokenizer, "pad_token": pad, "bos_token": bos, "eos_token": eos}
