"""Answers from vLLM, on servers (servers.py) or in this process (here.py); what both share.

Token ids go out, ids and their log-probabilities come back. vLLM gets the weights before it samples with them. Then a
few tokens are sampled and scored again (the canary), so that old weights are found out before anything is trained on
their answers. vLLM is not imported here."""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.functional.truncation import Candidates
from lmgym.inference import proof
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.completions import Answers, check_request
from lmgym.inference.vllm.canary import Canary
from lmgym.inference.vllm.pictures import as_sent, check_read, name_there
from lmgym.models import lora
from lmgym.models.policy import Policy
from lmgym.pictures.ids import is_piece
from lmgym.types import Restriction

SPARE = 16  # tokens that may be as likely as the last one that top_k keeps
NEVER = -9999.0  # what a server writes for a log-probability of minus infinity, or that is no number
EXCLUDED = -100.0  # added to a logit; vLLM takes no less
TEMPERATURE = 0.8  # of the canary: not 1, where log-probabilities of another distribution could look right


@dataclass(frozen=True)
class Query:
    """What vLLM is asked for: the prompt's ids, keyword arguments of its SamplingParams, and the pictures (Pillow, RGB)
    of the prompt, for each of which the ids have one mark.

    Example: Query([5, 6], {"max_tokens": 8, "logprobs": 0})"""

    ids: list[int]
    settings: Mapping[str, Any]
    pictures: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """What vLLM has sampled: ids, their log-probabilities, for each token the likeliest ones (id and log-probability;
    about as many as `logprobs` of the query), the versions of the weights, and the ids that it has read of a prompt
    with pictures.

    Example: Sampled([7, 2], [-0.5, -0.1], [[], []], {"3"})"""

    ids: list[int]
    logprobs: list[float]
    likeliest: list[list[tuple[int, float]]]
    versions: set[str]
    read: list[int] = field(default_factory=list)


class Vllm(Protocol):
    """Where vLLM runs."""

    remedy: str
    """What to do if it samples with other weights than it was given."""

    def reach(self, policy: Policy) -> int:
        """Start it, or see that it is there; the longest row that it takes, in tokens."""

    def sample(self, queries: Sequence[Query], first: int) -> Iterator[Sampled]:
        """The answers to all queries, in order; the `first` one is asked of that server (of the others in turn)."""

    def push(self, policy: Policy, version: int) -> None:
        """Let it sample with the policy's weights from now on, and call them by this version."""

    def instead_of_rounding(self, policy: Policy) -> str:
        """What to do if it may hold merged adapters in bf16; empty if it does not."""

    def apart(self) -> Sequence[tuple[str, "Vllm"]]:
        """Each server alone, with its name."""

    def close(self) -> None:
        """End what was started for it."""


class VLLM:
    """Samples with vLLM, at most `rows` answers at a time.

    Of several `ranks`, each asks for its own answers; the first one sends the weights and tries them. All wait for it,
    and all raise what any of them has raised. `canary` replaces the bound of the gap between sampled and scored
    log-probabilities (canary.py), in nats per token on average. Random numbers are vLLM's own: answers are not repeated
    from one run to the next.

    Raises LmgymError for vLLM that cannot be reached or lacks what is asked of it, for an answer of other weights than
    the newest, and if the canary finds a gap.

    Example: VLLM(policy, Servers(["http://127.0.0.1:8000"], Path("runs/a/served")))"""

    def __init__(
        self, policy: Policy, vllm: Vllm, rows: int = 256, canary: float | None = None, ranks: Ranks = ALONE
    ) -> None:
        if policy.encoder_decoder:
            raise LmgymError("engine.name: vllm samples from causal models; write sampler")
        self.policy, self.vllm, self.rows, self.canary, self.ranks = policy, vllm, rows, Canary(canary), ranks
        self._pushed, self._context = 0, policy.context or sys.maxsize
        self._together(self._reach)
        self.load(policy, 0)

    @property
    def context(self) -> int | None:
        return self._context

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        """One completion per request, in order. Raises LmgymError for beams, and to train for top_p and min_p without
        top_k."""
        check_sampling(sampling)
        sampling.check_vocabulary(self.policy.vocabulary)
        for request in requests:
            check_request(self.policy, request)
            if len(request.prompt_ids) >= self._context:
                raise LmgymError(
                    f"a prompt has {len(request.prompt_ids)} tokens, and vLLM reads {self._context} at most, answer "
                    "included; start a server with a larger --max-model-len, or in this process raise engine.cache_gib"
                )
        answers = Answers(self.policy, requests, sampling)
        rooms = [self._context - len(request.prompt_ids) for request in requests]
        answers.limits = [min(limit, room) for limit, room in zip(answers.limits, rooms, strict=True)]
        images = dict[str, Any]()  # an answer shares its pictures with others of its group
        queries = [self._query(answers, number, images) for number in range(len(requests))]
        for number, sampled in enumerate(self.vllm.sample(queries, self.ranks.rank)):
            self._take(answers, number, sampled)
            if ended is not None:
                ended(number, answers.ids[number])
        return answers.completions()

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "VLLM":
        raise LmgymError("engine.name: vllm cannot restrict what is sampled by a frozen policy; write sampler")

    def release(self) -> None:
        """Nothing: vLLM's memory is its own."""

    def forget(self, conversations: Sequence[int]) -> None:
        """Nothing to free here: vLLM decides what it caches of prompts."""

    def load(self, policy: Policy, version: int) -> None:
        """Let vLLM load the policy's weights, and try them."""
        self.policy, self._pushed = policy, self._pushed + 1
        self._together(self._renew if self.ranks.first else None)

    def close(self) -> None:
        """End what was started. Servers go on."""
        self.vllm.close()

    def _together(self, act: Callable[[], None] | None) -> None:
        """Do this rank's part, wait for the other ranks, and raise the first error of any of them."""
        error: LmgymError | None = None
        try:
            if act is not None:
                act()
        except LmgymError as found:
            error = found
        said = [part.decode() for part in self.ranks.gather(str(error or "").encode())]
        if any(said):
            raise LmgymError(next(filter(None, said))) from error

    def _reach(self) -> None:
        self._context = min(self._context, self.vllm.reach(self.policy))

    def _renew(self) -> None:
        self.vllm.push(self.policy, self._pushed)
        self._try()

    def _try(self) -> None:
        """The canary: a few answers of every server, scored by the policy."""
        policy = self.policy.but(ranks=ALONE)  # no other rank scores with this one
        for name, vllm in self.vllm.apart():
            alone = copy.copy(self)
            alone.vllm = vllm
            self.canary.check(name, policy, proof.sample(policy, alone, TEMPERATURE), self.vllm.remedy)

    def _query(self, answers: Answers, number: int, images: dict[str, Any]) -> Query:
        """What is asked of vLLM for an answer. `images` are the pictures that were opened so far, by their names."""
        request, sampling = answers.requests[number], answers.sampling
        settings = {
            "max_tokens": answers.limits[number],
            "min_tokens": min(sampling.min_new_tokens, answers.limits[number]),
            "temperature": sampling.temperature,
            "logprobs": 0,  # of the sampled token alone
            "seed": request.key % 2**63,
            "ignore_eos": True,  # its stop ids are among these:
            "stop_token_ids": sorted(answers.stop_ids),
            "detokenize": bool(answers.stop_texts[number]),
        }
        if sampling.truncates:
            cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            settings |= {name: value for name, value in cuts.items() if value is not None}
            if answers.keeps_sets and sampling.top_k is not None:
                settings["logprobs"] = min(sampling.top_k + SPARE, self.policy.vocabulary)
        if texts := answers.stop_texts[number]:
            settings |= {"stop": list(texts), "include_stop_str_in_output": True}
        if self.policy.vision is None:
            return Query(list(request.prompt_ids), settings)
        settings["logit_bias"] = dict.fromkeys(self.policy.never, EXCLUDED)
        reader = self.policy.vision.reader
        ids, names = as_sent(reader, request.prompt_ids)
        images |= {name: reader.image(name) for name in names if name not in images}
        return Query(ids, settings, tuple(images[name] for name in names))

    def _take(self, answers: Answers, number: int, sampled: Sampled) -> None:
        """Add what vLLM has sampled to an answer, up to where lmgym's own rules end it."""
        prompt = answers.requests[number].prompt_ids
        if self.policy.vision is not None and any(map(is_piece, prompt)):
            check_read(self.policy.vision.reader, prompt, sampled.read)
        truncates = answers.sampling.truncates and answers.keeps_sets
        kept = [self._kept(one, answers.sampling) for one in sampled.likeliest] if truncates else []
        if sampled.versions - {str(self._pushed)}:
            raise LmgymError(
                f"vLLM sampled with weights {', '.join(sorted(sampled.versions))}, and {self._pushed} were sent; does "
                "another run use it?"
            )
        for token, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
            if answers.stops[number]:
                break
            if not math.isfinite(logprob) or logprob <= NEVER:
                raise LmgymError("vLLM reported a log-probability that is no number; has the policy diverged?")
            answers.add(number, token, logprob)
        if kept:
            taken = kept[: len(answers.ids[number])]
            answers.add_sets([number] * len(taken), _table(taken))
        answers.stops[number] = answers.stops[number] or "stop"  # a stop string that only its own decoding shows

    def _kept(self, likeliest: Sequence[tuple[int, float]], sampling: Sampling) -> list[int]:
        """The ids of the tokens that a token was drawn from, of the likeliest ones and their log-probabilities. Raises
        LmgymError if none of these was cut off, since there may then be more."""
        kept = sorted(token for token, logprob in likeliest if logprob > NEVER)
        if len(kept) == len(likeliest) < self.policy.vocabulary:
            raise LmgymError(
                f"sampling.top_k is {sampling.top_k}, and vLLM drew a token from {len(kept)} or more: so many are "
                "equally likely; write engine.name: sampler, or leave top_k out"
            )
        return kept


def check_sampling(sampling: Sampling) -> None:
    """Raise LmgymError for what vLLM cannot do so that training knows what tokens were drawn from. (vLLM 0.32's own
    way, --return-sampling-mask, asks for top_k too.)"""
    if isinstance(sampling, Decoding):  # nothing trains on its answers
        if sampling.generation:
            raise LmgymError("evaluation.generation: vllm searches no beams; leave it out, or engine.name: sampler")
    elif sampling.has_unbounded_sets:
        raise LmgymError(
            "engine.name: vllm tells which tokens were left of sampling.top_k at most, so top_p and min_p need top_k "
            "beside them; or write engine.name: sampler"
        )


def weights_of(policy: Policy, merge: bool = True) -> dict[str, Tensor]:
    """The policy's weights by name as vLLM loads them, adapters merged or left out. Where the policy computes in bf16
    with stochastic rounding, so are the merged ones: to nearest, small updates would be lost. A tied head is there too:
    vLLM 0.32 would keep its old one."""
    if lora.has_adapter(policy.model) and not merge:
        return lora.base_weights(policy.model)
    model = lora.merged(policy.model) if lora.has_adapter(policy.model) else policy.model
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if policy.rounded is not None and model is not policy.model:
        weights |= policy.rounded.rounded({name: weights[name] for name in lora.adapted_names(policy.model)})
    elif policy.rounded is not None:  # a tied head has a name of its own here too
        rounded = {parameter.data_ptr(): policy.computed(parameter) for parameter in policy.parameters()}
        weights = {name: rounded.get(tensor.data_ptr(), tensor) for name, tensor in weights.items()}
    return {name_there(policy.model.config.model_type, name): tensor for name, tensor in weights.items()}


def _table(sets: Sequence[Sequence[int]]) -> Candidates:
    """Sets of ids as a table; the first id fills up the rows."""
    width = max(map(len, sets), default=1)
    ids = torch.tensor([[*one, *[one[0]] * (width - len(one))] for one in sets]).view(-1, width)
    sizes = torch.tensor([len(one) for one in sets])
    return Candidates(ids, torch.arange(width) < sizes[:, None])
