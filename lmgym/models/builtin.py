"""Built-in models and tokenizers: small, with random weights that depend on the seed only; nothing is downloaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
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
from lmgym.models.seeded import seeded

BUILTIN = "builtin:tiny"
PREFIX = "builtin:"
LARGEST_SIZE, MOST_LAYERS = 2**17, 1000  # of a built-in model's architecture: beyond, it would be built for minutes
SPECIAL = ["<pad>", "<bos>", "<eos>"]  # ids 0, 1 and 2 of every built-in tokenizer
DERIVED = ("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings")  # computed by T5Config


@dataclass(frozen=True)
class Family:
    """A built-in model: its classes, the configuration fields that differ from the defaults of the class, and the file
    of its weights beside this module, if it has been trained.
    Example: Family(GPT2Config, GPT2LMHeadModel, {"n_embd": 64})"""

    config: type[Any]
    model: Callable[[Any], PreTrainedModel]
    fields: Mapping[str, Any]
    weights: str | None = None


TINY_LLAMA = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
# Dropout is 0 everywhere: sampler and update must compute the same distribution.
MODELS = {
    BUILTIN: Family(LlamaConfig, LlamaForCausalLM, TINY_LLAMA),
    # Trained by recipes/sums.yaml: the final/model.safetensors of that run.
    "builtin:sums": Family(LlamaConfig, LlamaForCausalLM, TINY_LLAMA, weights="sums.safetensors"),
    "builtin:tiny_gpt2": Family(GPT2Config, GPT2LMHeadModel, {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
        "activation_function": "gelu_pytorch_tanh",  # the same as GPT-2's gelu_new, in one kernel
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "builtin:tiny_t5": Family(T5Config, T5ForConditionalGeneration, {
        "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,  # the padding, as in T5
    }),
    "builtin:tiny_bart": Family(BartConfig, BartForConditionalGeneration, {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
        "max_position_embeddings": 512, "dropout": 0.0,
        "decoder_start_token_id": 1,  # not BART's own, its EOS, which would end an answer at once
        "forced_bos_token_id": None, "forced_eos_token_id": None,
    }),
}  # fmt: skip


def is_builtin(name: str) -> bool:
    """True if the name of a model or tokenizer begins with "builtin:". (`builtin_model` refuses unknown ones.)"""
    return name.startswith(PREFIX)


def builtin_model(
    name: str, tokenizer: PreTrainedTokenizerFast, architecture: Mapping[str, Any], seed: int
) -> PreTrainedModel:
    """A model of less than a million parameters, in fp32 on the CPU; the same arguments give the same weights.

    builtin:tiny is a Llama, builtin:tiny_gpt2 a GPT-2, builtin:tiny_t5 a T5, builtin:tiny_bart a BART, all with random
    weights. builtin:sums is the Llama after training on sums (recipes/sums.yaml): it continues "37 + 45\nAnswer:".
    `architecture` sets fields of the model's transformers configuration. Raises LmgymError for an unknown name, an
    unknown field, and values that do not fit together or not to trained weights."""
    config, family = builtin_config(name, tokenizer, architecture), MODELS[name]
    with seeded(seeds.key(seed, "initial weights")):
        try:
            model = family.model(config)
            if architecture and model.device.type != "meta":
                _check_runs(model)
        except Exception as error:  # various exceptions of the library, for sizes that do not fit together
            raise _unfit(error) from error
    if family.weights and model.device.type != "meta":
        load_model(model, Path(__file__).parent / family.weights)
    return model


def builtin_config(name: str, tokenizer: PreTrainedTokenizerFast, architecture: Mapping[str, Any]) -> Any:
    """The transformers configuration of a built-in model that reads texts. Raises LmgymError as `builtin_model`."""
    if name not in MODELS:
        raise LmgymError(f"policy.model: there is no '{name}'; {suggest(name, MODELS)}")
    family = MODELS[name]
    if family.weights and (architecture or len(tokenizer) != len(byte_tokenizer())):
        raise LmgymError(
            f"policy.model: {name} is trained, with builtin:bytes and the architecture of {BUILTIN}; remove "
            f"policy.architecture and policy.tokenizer, or name {BUILTIN}"
        )
    check_architecture(architecture, set(family.config().to_dict()) - set(DERIVED if family.config is T5Config else ()))
    try:
        return family.config(**{**ids_of(tokenizer), **family.fields, **architecture})
    except Exception as error:  # various exceptions of the library
        raise _unfit(error) from error


def check_architecture(architecture: Mapping[str, Any], known: set[str]) -> None:
    """Raise LmgymError for a field of a built-in model that is not `known`, or that makes it large."""
    for key, value in architecture.items():
        if key not in known:
            raise LmgymError(f"unknown key 'policy.architecture.{key}'; {suggest(str(key), known)}")
        most = MOST_LAYERS if "layer" in key else LARGEST_SIZE
        if isinstance(value, int) and value > most:
            raise LmgymError(f"policy.architecture.{key} is {value}; a built-in model is small: at most {most}")


def ids_of(tokenizer: Any) -> dict[str, int | None]:
    """What a model's configuration says of its tokenizer: the size of the vocabulary, and its special ids."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {"vocab_size": len(tokenizer), **special}


def _unfit(error: Exception) -> LmgymError:
    return LmgymError(f"policy.architecture: {' '.join(str(error).split())[:300]}")


def _check_runs(model: PreTrainedModel) -> None:
    """Let the model read one token: sizes that do not fit together may show no earlier."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    except Exception as error:
        raise ValueError(f"the model cannot run: {error}") from error
    model.train(training)


def builtin_tokenizer(name: str = "builtin:bytes") -> PreTrainedTokenizerFast:
    """The tokenizer builtin:bytes or builtin:numbers; LmgymError for another name."""
    if name not in TOKENIZERS:
        raise LmgymError(f"policy.tokenizer: there is no '{name}'; {suggest(name, TOKENIZERS)}")
    return TOKENIZERS[name]()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: ids 0 pad, 1 BOS, 2 EOS, then the 256 bytes. Decoding restores any text exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPECIAL + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(**_special(tokenizer), model_max_length=512)


class NumberTokenizer(PreTrainedTokenizerFast):
    """A tokenizer of the numbers 0 to 99 (ids 3 to 102), separated by white space; ids 0 pad, 1 BOS, 2 EOS.

    Decoding joins them with single spaces. Encoding any other word raises LmgymError. (A tokenizer that was saved and
    loaded again is transformers' own class with the same ids, and raises another error.)"""

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


# The class's name is written into a saved model; only transformers' own name can be loaded without lmgym.
NumberTokenizer.__name__ = PreTrainedTokenizerFast.__name__


def number_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 103 ids, so small that a model without pretraining learns increasing numbers within minutes."""
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
    """Add special tokens, and BOS in front of a text; returns the arguments of PreTrainedTokenizerFast."""
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    pad, bos, eos = SPECIAL
    return {"tokenizer_object": tokenizer, "pad_token": pad, "bos_token": bos, "eos_token": eos}
