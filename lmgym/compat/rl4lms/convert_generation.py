"""Convert RL4LMs' generation_kwargs: those of rollouts to `sampling:`, those of evaluations to `evaluation:`.

They are keywords of Hugging Face's `generate`, so its defaults apply to those left out: top_k is 50 for sampling."""

from collections.abc import Mapping
from typing import Any

from lmgym.compat.rl4lms.schema import Conversion, Section
from lmgym.inference.generation_options import KEYS

TOP_K = 50  # the default of `generate`
Length = tuple[int, int]  # most and fewest new tokens


def lengths(section: Section, longest: int | None, seq2seq: bool, conversion: Conversion) -> Length:
    """Most and fewest new tokens of an answer.

    `longest` is the environment's max_episode_length or None: RL4LMs pays no reward for an answer that
    neither ends nor reaches it. Hugging Face counts min_length with the start token of an encoder-decoder, so one token
    fewer is new; RL4LMs adds the prompt's length for a causal model.

    Example: min_length 10, max_new_tokens 20 of a T5 -> (20, 9); of a GPT-2 -> (20, 10)"""
    given = section.take("max_new_tokens", int)
    if given is None:
        given = longest if longest is not None else 20
        whose = "env.args.max_episode_length" if longest is not None else "Hugging Face's own default of length"
        conversion.warn(
            f"{section.key}.max_new_tokens is left out: an answer has at most {given} tokens ({whose}); RL4LMs takes "
            "the max_length of the model's generation_config, often 20"
        )
    most = given if longest is None else min(given, longest)
    if most < given:
        conversion.warn(f"{section.key}.max_new_tokens is {given}; env.args.max_episode_length ends answers at {most}")
    least = section.take("min_length", int, 0)
    least = max(section.take("min_new_tokens", int, least - seq2seq), 0)
    if least > most:
        conversion.warn(f"{section.key}.min_length is above the most tokens of an answer; it is taken as {most}")
    return most, min(least, most)


def rollout(section: Section, size: Length, masked: bool, conversion: Conversion) -> dict[str, Any]:
    """The `sampling:` section. With `masked` (NLPO) only the mask restricts the tokens that may be drawn."""
    sampling: dict[str, Any] = {"max_new_tokens": size[0], "min_new_tokens": size[1]}
    if not section.take("do_sample", bool, False):
        conversion.warn(
            f"{section.key}.do_sample is not true: rollouts are sampled all the same, since a policy learns nothing "
            "from one greedy answer (RL4LMs fails there)"
        )
    sampling |= _draws(section, conversion)
    if masked and (cut := [name for name in ("top_k", "top_p") if sampling.pop(name, None) is not None]):
        conversion.warn(f"{section.key}: no {' and '.join(cut)} in NLPO's rollouts: the mask decides what may be drawn")
    if section.take("num_beams", int, 1) > 1:
        conversion.warn(f"{section.key}.num_beams: rollouts are sampled, without beams (RL4LMs fails there)")
    for name in section.rest():
        conversion.warn(f"{section.key}.{name}: not applied in rollouts, which are scored as they were drawn")
    return sampling


def evaluation(section: Section, size: Length, conversion: Conversion) -> dict[str, Any]:
    """The decoding keys of `evaluation:`, for greedy answers, sampling or beam search."""
    keys: dict[str, Any] = {"max_new_tokens": size[0], "min_new_tokens": size[1], "temperature": 0.0}
    if section.take("do_sample", bool, False):
        keys |= _draws(section, conversion)
    else:
        section.idle(conversion, "temperature", "top_k", "top_p")
    post = section.take("post_processing_fn", Any)
    if post is not None:
        keys["post_processing"] = post["id"] if isinstance(post, Mapping) and "id" in post else post
    generation: dict[str, Any] = {}
    for name, value in section.rest().items():
        if name in KEYS and value is not None:
            generation[name] = value
        else:
            conversion.warn(f"{section.key}.{name}: lmgym has no such key, so it is not applied")
    if generation.get("num_beams") == 1:
        del generation["num_beams"]
    if "num_beams" not in generation:
        for name in ("length_penalty", "early_stopping"):
            if generation.pop(name, None) is not None:
                conversion.idle.append(f"{section.key}.{name}")
    return keys | ({"generation": generation} if generation else {})


def _draws(section: Section, conversion: Conversion) -> dict[str, Any]:
    """Temperature, top_k (0: off) and top_p (1: off) of sampling."""
    if "top_k" not in section:
        conversion.note(f"{section.key}.top_k is left out -> {TOP_K}, which Hugging Face's generate takes then")
    draws: dict[str, Any] = {"temperature": section.take("temperature", float, 1.0)}
    top_k, top_p = section.take("top_k", int, TOP_K), section.take("top_p", float, 1.0)
    return draws | ({"top_k": top_k} if top_k > 0 else {}) | ({"top_p": top_p} if top_p < 1 else {})
