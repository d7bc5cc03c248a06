"""The keys of Hugging Face's GenerationConfig that `evaluation.generation` may set (for hf_generate.py). No torch."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

from packaging.version import Version

from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.core.validation import converted

KEYS: dict[str, Any] = {
    "num_beams": PositiveInt,
    "length_penalty": float,
    "early_stopping": Literal[True, False, "never"],
    "no_repeat_ngram_size": int,
    "encoder_no_repeat_ngram_size": int,
    "repetition_penalty": float,
    "encoder_repetition_penalty": float,
    "exponential_decay_length_penalty": tuple[int, float],
    "bad_words_ids": list[list[int]],
    "suppress_tokens": list[int],
    "begin_suppress_tokens": list[int],
    "forced_eos_token_id": int,
    "renormalize_logits": bool,
    "remove_invalid_values": bool,
    "typical_p": float,
    "epsilon_cutoff": float,
    "eta_cutoff": float,
}
OF_BEAMS = ("length_penalty", "early_stopping")
OF_DRAWS = ("typical_p", "epsilon_cutoff", "eta_cutoff")
OF_IDS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
ELSEWHERE = {  # keys of GenerationConfig that have a place of their own in a recipe
    "do_sample": "evaluation.temperature above 0",
    "temperature": "evaluation.temperature",
    "top_k": "evaluation.top_k",
    "top_p": "evaluation.top_p",
    "min_p": "evaluation.min_p",
    "max_new_tokens": "evaluation.max_new_tokens",
    "max_length": "evaluation.max_new_tokens",
    "min_new_tokens": "evaluation.min_new_tokens",
    "min_length": "evaluation.min_new_tokens",
    "num_return_sequences": "evaluation.samples",
    "stop_strings": "sampling.stop",
    "eos_token_id": "sampling.stop_ids",
    "decoder_start_token_id": "policy.context_start_token",
    "forced_bos_token_id": "policy.context_start_token",
}


def checked(generation: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The keys and values of `evaluation.generation`, as GenerationConfig wants them. Raises LmgymError for an unknown
    key or a wrong value, and for one that would have no effect."""
    values = {}
    for key, value in generation.items():
        if key in ELSEWHERE:
            raise LmgymError(f"evaluation.generation.{key} has a place of its own; write {ELSEWHERE[key]}")
        if key not in KEYS:
            raise LmgymError(f"unknown key 'evaluation.generation.{key}'; {suggest(str(key), KEYS)}")
        values[key] = converted(KEYS[key], value, f"evaluation.generation.{key}")
    beams = values.get("num_beams", 1)
    for key in OF_BEAMS:
        if key in values and beams == 1:
            raise LmgymError(f"evaluation.generation.{key} is about beams; give num_beams above 1 with it")
    for key in OF_DRAWS:
        if key in values and temperature == 0:
            raise LmgymError(
                f"evaluation.generation.{key} is about sampling, and evaluation.temperature is 0; write temperature: "
                "1.0 or so with it"
            )
    if beams > 1 and "encoder_repetition_penalty" in values and Version(version("transformers")) < Version("5.19"):
        raise LmgymError(
            "evaluation.generation.encoder_repetition_penalty: transformers before 5.19 gives it to the wrong beams; "
            "install transformers 5.19 or later, or leave num_beams out"
        )
    return values


def ids_of(values: Mapping[str, Any]) -> dict[str, list[int]]:
    """The token ids of each checked key that has some.

    Example: ids_of({"num_beams": 2, "bad_words_ids": [[7], [8, 9]]}) -> {"bad_words_ids": [7, 8, 9]}"""
    given = {key: values[key] if isinstance(values[key], list) else [values[key]] for key in OF_IDS if key in values}
    return {key: [id for one in own for id in (one if isinstance(one, list) else [one])] for key, own in given.items()}
