"""The answers of one `generate` call while they grow: which requests are valid, what ends an answer, what is stored."""

from collections.abc import Sequence

from lmgym.core.errors import LmgymError
from lmgym.functional import truncation
from lmgym.inference.base import PAUSED, Completion, Decoding, Request, Sampling
from lmgym.models.device import memory_here
from lmgym.models.policy import Policy
from lmgym.pictures.ids import is_piece
from lmgym.text.chat import decode
from lmgym.text.control import control_tokens


def check_request(policy: Policy, request: Request) -> None:
    """Raise LmgymError if the prompt is empty, or so long that the context has no room for an answer."""
    context = policy.context
    if not request.prompt_ids or (policy.encoder_decoder and not request.source_ids):
        raise LmgymError("a prompt has no token at all; give it some text, or a tokenizer with a BOS token")
    check_ids(policy, [*request.source_ids, *request.prompt_ids, *request.begun], "a prompt")
    if context is not None and len(request.source_ids) > context:
        raise LmgymError(
            f"a prompt has {len(request.source_ids)} tokens, and the encoder reads {context} at most; shorten the "
            "prompts or take a model with a longer context"
        )
    if context is not None and len(request.prompt_ids) >= context:
        raise LmgymError(
            f"a prompt has {len(request.prompt_ids)} tokens, and the model reads {context} at most, answer "
            "included; shorten the prompts or take a model with a longer context"
        )


def check_ids(policy: Policy, ids: Sequence[int], what: str) -> None:
    """Raise LmgymError, naming the first one, if `ids` of a text (`what`) are not in the model's vocabulary."""
    if max(ids, default=0) >= policy.vocabulary:
        beyond = next((id for id in ids if id >= policy.vocabulary and not is_piece(id)), None)
        if beyond is None and policy.vision is not None:
            return
        if beyond is None:
            raise LmgymError(
                f"{what} holds a picture, and the policy ({policy.model.config.model_type}) reads texts only; take a "
                "model that reads pictures, with its processor beside it (docs/vision.md)"
            )
        raise LmgymError(
            f"{what} holds {policy.tokenizer.convert_ids_to_tokens(beyond)!r} (id {beyond}), and the model has the ids "
            f"0 to {policy.vocabulary - 1} only; take that token out of the texts or the chat template, or name the "
            "model's own tokenizer (policy.tokenizer)"
        )


def check_memory(policy: Policy, sampling: Sampling) -> None:
    """Raise LmgymError if the memory cannot hold one answer of `max_new_tokens`, where no context ends it before."""
    here, most = memory_here(policy.device.type), sampling.max_new_tokens
    if policy.context is None and here is not None and most > here // _token_bytes(policy):
        raise LmgymError(
            f"{sampling.section}.max_new_tokens is {most:,}, and the memory here holds the keys and values of "
            f"{here // _token_bytes(policy):,} tokens at most, of all answers together; lower it"
        )


def _token_bytes(policy: Policy) -> int:
    """What a token of an answer takes at least: its key and value in each layer, and its random number."""
    config = policy.model.config.get_text_config(decoder=True)
    queries = getattr(config, "num_attention_heads", 0) or 0
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    size = size or getattr(config, "hidden_size", 0) // max(queries, 1)
    layers = getattr(config, "num_decoder_layers", None) or getattr(config, "num_hidden_layers", 0) or 0
    return 2 * layers * heads * size * policy.compute.itemsize + 8


class Answers:
    """One answer for each request, token by token.

    An answer ends with a stop id, with the token that completes a stop string, or at its limit: `max_new_tokens` or the
    end of the model's context. `stops` holds the reason ("eos", "stop", "length", "context"), "" for an unfinished one;
    one that reaches its request's `pause` is "paused". `ids` begin with those that the request has brought.

    Example: answers.add(0, token=7, logprob=-0.5); answers.stops[0]"""

    def __init__(self, policy: Policy, requests: Sequence[Request], sampling: Sampling) -> None:
        self.policy, self.requests, self.sampling = policy, requests, sampling
        most, context = sampling.max_new_tokens, policy.context
        self.limits = [min(most, context - len(request.prompt_ids)) if context else most for request in requests]
        self.stop_ids = {*policy.stop_ids, *sampling.stop_ids}
        self.stop_texts = [(*sampling.stop, *request.stop) for request in requests]
        longest = max((len(text.encode()) for texts in self.stop_texts for text in texts), default=0)
        self.tail = longest + 4  # tokens that may hold a stop string: a token may be a single byte
        # The text of an answer is without special tokens, so a stop string that names one is looked for with them.
        special = control_tokens(policy.tokenizer).names if longest else None
        self.special_texts = [tuple(filter(special.search, own)) if special else () for own in self.stop_texts]
        self.stops = [""] * len(requests)
        self.ids: list[list[int]] = [list(request.begun) for request in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.kept: list[list[truncation.Sets]] = [[] for _ in requests]
        self.kept_bytes = 0
        self.keeps_sets = not isinstance(sampling, Decoding)

    @property
    def most(self) -> list[int]:
        """Tokens that each answer may have at the end of this call, those that it began with included."""
        pairs = zip(self.limits, self.requests, strict=True)
        return [limit if request.pause is None else min(limit, request.pause) for limit, request in pairs]

    def add(self, request: int, token: int, logprob: float | None = None) -> None:
        """Append a token to an unfinished answer, with its log-probability if it has one."""
        ids = self.ids[request]
        ids.append(token)
        if logprob is not None:
            self.logprobs[request].append(logprob)
        if token in self.stop_ids:
            self.stops[request] = "eos" if token in self.policy.stop_ids else "stop"
        elif self.stop_texts[request] and self.holds_stop(request, ids):
            self.stops[request] = "stop"
        elif len(ids) >= self.limits[request]:
            self.stops[request] = "length" if len(ids) >= self.sampling.max_new_tokens else "context"
        elif len(ids) == self.requests[request].pause:
            self.stops[request] = PAUSED

    def add_sets(self, requests: Sequence[int], candidates: truncation.Candidates) -> None:
        """Store the sets of these answers' next tokens. LmgymError if all sets take more than `sampling.kept_gib`."""
        if not self.keeps_sets:
            return
        for request, kept in zip(requests, truncation.to_arrays(candidates, self.policy.vocabulary), strict=True):
            self.kept[request].append(kept)
            self.kept_bytes += kept.nbytes
        if self.kept_bytes > self.sampling.kept_gib * 2**30:
            raise LmgymError(
                f"the kept sets of {len(self.requests)} answers take more than sampling.kept_gib "
                f"({self.sampling.kept_gib}); raise it, or lower sampling.top_k, prompts_per_step or max_new_tokens"
            )

    def holds_stop(self, request: int, ids: Sequence[int]) -> bool:
        """True if a stop string occurs near the end of this answer's ids."""
        tokenizer, tail, special = self.policy.tokenizer, list(ids[-self.tail :]), self.special_texts[request]
        text = decode(tokenizer, tail)
        if any(stop in text for stop in self.stop_texts[request]):
            return True
        text = str(tokenizer.decode(tail, clean_up_tokenization_spaces=False)) if special else ""
        return any(stop in text for stop in special)

    def completions(self) -> list[Completion]:
        """What was sampled for each request, in their order."""
        ids = [own[len(request.begun) :] for own, request in zip(self.ids, self.requests, strict=True)]
        sets = [truncation.concatenate(kept) if kept else None for kept in self.kept]
        return [Completion(*columns) for columns in zip(ids, self.logprobs, self.stops, sets, strict=True)]
