"""Hugging Face's `generate` for evaluations: beam search, penalties and other keys of its GenerationConfig.

Such answers have no log-probabilities, because nothing is trained on them. Of the model's own generation_config only
the ids that end an answer and an encoder-decoder's first tokens are used: the recipe alone names top_k or beams."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lmgym.core import progress
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Completion, Decoding, Request
from lmgym.inference.completions import Answers
from lmgym.inference.generation_options import checked
from lmgym.models.families import WITHOUT_CACHE, supports_fast_path
from lmgym.models.policy import Policy
from lmgym.models.seeded import seeded
from lmgym.pictures.ids import is_piece

LOOK_BACK = {"no_repeat_ngram_size", "repetition_penalty"}
LOOK_AT_PROMPT = {"encoder_no_repeat_ngram_size", "encoder_repetition_penalty"}


def generate(policy: Policy, requests: Sequence[Request], decoding: Decoding, rows: int) -> list[Completion]:
    """One completion per request, in order, with the ids that the model's own `generate` returns.

    With temperature 0 an answer depends on its request only. Above 0, torch's generator is seeded for each block of
    answers by the key of the block's first request: an evaluation repeats exactly, but an answer also depends on the
    other requests of its block. Raises LmgymError if Hugging Face refuses the settings."""
    answers = Answers(policy, requests, decoding)
    settings = checked(decoding.generation, decoding.temperature)
    for block in _blocks(policy, answers, settings, max(rows // settings.get("num_beams", 1), 1)):
        inputs, start = _inputs(policy, [requests[request] for request in block])
        config = _configuration(policy, answers, settings, answers.limits[block[0]])
        stops = StoppingCriteriaList([_StopStrings(answers, block[0], start)] if answers.stop_texts[block[0]] else [])
        random = seeded(requests[block[0]].key, [policy.device] if policy.device.type == "cuda" else [])
        try:
            with _blank_configuration(policy.model), random if decoding.temperature > 0 else nullcontext():
                output = policy.model.generate(**inputs, generation_config=config, stopping_criteria=stops)
        except ValueError as error:
            raise LmgymError(f"evaluation.generation: {' '.join(str(error).split())[:300]}") from error
        for request, ids in zip(block, output[:, start:].tolist(), strict=True):
            for token in ids:
                if not answers.stops[request]:  # behind the end there is padding
                    answers.add(request, token)
        progress.count(sum(map(bool, answers.stops)), len(requests), "answers")
    return answers.completions()


def _blocks(policy: Policy, answers: Answers, settings: Mapping[str, Any], rows: int) -> list[list[int]]:
    """Requests in blocks that are decoded together: of one answer limit and with the same stop strings. Prompts of a
    block have one length if padding would change results: for settings that read the prompt, and for causal models
    not on the fast path's list. (Left padding is exact for those on it, right padding for encoders.)"""
    reads_prompt = LOOK_AT_PROMPT if policy.encoder_decoder else LOOK_AT_PROMPT | LOOK_BACK
    pads = policy.encoder_decoder or (policy.fast and supports_fast_path(policy.model.config))
    unpadded = bool(settings.keys() & reads_prompt) or not pads
    lengths = [len(request.source_ids or request.prompt_ids) for request in answers.requests]
    alike = lengths if unpadded else [0] * len(lengths)
    kinds = list(zip(answers.limits, alike, answers.stop_texts, strict=True))
    blocks: list[list[int]] = []
    for request in sorted(range(len(lengths)), key=lambda index: (kinds[index], lengths[index])):
        last = blocks[-1] if blocks else []
        fits = last and len(last) < rows and kinds[last[0]] == kinds[request]
        fits = fits and not any(is_piece(max(answers.requests[one].prompt_ids)) for one in (last[0], request))
        if fits and (len(last) + 1) * lengths[request] <= policy.tokens_per_forward:
            last.append(request)
        else:
            blocks.append([request])
    return blocks


def _inputs(policy: Policy, requests: Sequence[Request]) -> tuple[dict[str, Tensor], int]:
    """The arguments of `generate` (prompts padded on the left, sources on the right), and the column of the answers."""
    prompts = [request.source_ids if policy.encoder_decoder else request.prompt_ids for request in requests]
    if policy.vision is not None and len(prompts) == 1:
        own = policy.vision.own_inputs(torch.tensor(prompts, device=policy.device))
        return {**own, "attention_mask": torch.ones_like(own["input_ids"])}, len(prompts[0])
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), policy.pad_id)
    mask = torch.zeros_like(ids)
    for row, row_ids in enumerate(prompts):
        columns = slice(0, len(row_ids)) if policy.encoder_decoder else slice(longest - len(row_ids), longest)
        ids[row, columns], mask[row, columns] = torch.tensor(row_ids), 1
    inputs = {"inputs": ids.to(policy.device), "attention_mask": mask.to(policy.device)}
    if not policy.encoder_decoder:
        if policy.first_position:  # `generate` itself begins at 0
            inputs |= policy.positions((inputs["attention_mask"].cumsum(1) - 1).clamp(min=0))
        return inputs, longest
    inputs["decoder_input_ids"] = torch.tensor([request.prompt_ids for request in requests], device=policy.device)
    return inputs, len(requests[0].prompt_ids)


def _configuration(policy: Policy, answers: Answers, settings: Mapping[str, Any], limit: int) -> GenerationConfig:
    decoding = answers.sampling
    sampling: dict[str, Any] = {"do_sample": False}
    if decoding.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": decoding.temperature,
            "top_k": decoding.top_k or 0,  # Hugging Face's default would be 50
            "top_p": 1.0 if decoding.top_p is None else decoding.top_p,
            "min_p": decoding.min_p,
        }
    never = [*policy.never, *settings.get("suppress_tokens", ())]
    return GenerationConfig(
        max_new_tokens=limit,
        min_new_tokens=min(decoding.min_new_tokens, limit),
        eos_token_id=sorted(answers.stop_ids),
        pad_token_id=policy.pad_id,
        use_cache=policy.model.config.model_type not in WITHOUT_CACHE,
        decoder_start_token_id=policy.decoder_start[0] if policy.encoder_decoder else None,
        **{**sampling, **settings, "suppress_tokens": never or None},
    )


class _StopStrings(StoppingCriteria):
    """End an answer (or a beam) with the token that completes a stop string, as lmgym's sampler does."""

    def __init__(self, answers: Answers, request: int, start: int) -> None:
        self.answers, self.request, self.start = answers, request, start

    def __call__(self, input_ids: Int[Tensor, "R L"], scores: Any, **kwargs: Any) -> Bool[Tensor, " R"]:  # type: ignore[override]
        ended = [self.answers.holds_stop(self.request, ids) for ids in input_ids[:, self.start :].tolist()]
        return torch.tensor(ended, device=input_ids.device)


@contextmanager
def _blank_configuration(model: Any) -> Iterator[None]:
    """Within this context the model's own generation_config is empty, so that `generate` takes no defaults from it."""
    usual, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = usual
