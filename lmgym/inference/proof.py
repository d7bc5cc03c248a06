"""A model proves itself before it trains: what is sampled, what is scored and what the model itself says must agree.

A few tokens are sampled with the run's engine and scored as in training. Both are compared with the model's own forward
pass, called as Hugging Face's documentation calls it: each row alone, without padding, cache or positions. If they
differ by more than rounding explains, lmgym calls this model wrongly, and the run is refused. docs/models.md has the
formula of the bound and a table of all families.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Engine, Request, Sampling
from lmgym.models import scoring
from lmgym.models.distributions import logprobs_of_logits
from lmgym.models.integrity import check_finite
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

LENGTHS = (9, 4, 4)  # tokens of the prompts; two are of one length, so that some rows share a pass
ANSWERS = 2  # to each prompt, so that its keys and values are shared
NEW = 8  # tokens of an answer
QUANTILE = 0.95
FACTOR = 8.0  # of the bound over the error that independent roundings would add up to
TAIL = 5.0  # of the quantile over the mean; 2.5 if errors are normal

T = TypeVar("T")


@dataclass(frozen=True)
class Gap:
    """Absolute differences of log-probabilities in nats: their mean over the tokens, and their 0.95 quantile.
    Example: Gap(mean=2e-7, high=6e-7)"""

    mean: float
    high: float

    def __str__(self) -> str:
        high = f" (0.95 quantile {self.high:.2g})" if math.isfinite(self.high) else ""
        return f"{self.mean:.2g} nats a token{high}"


@dataclass(frozen=True)
class Proof:
    """The gaps of what was sampled and of what was scored to what the model itself says, and the bound on both.

    Example:
        >>> proof = prove(policy, Sampler(policy)); proof.bound.mean, proof.holds
        (1.4e-05, True)
    """

    family: str
    compute: str
    tokens: int
    sampled: Gap
    scored: Gap
    bound: Gap
    causal: bool = True  # False: the model's own pass reads the tokens after the one that it predicts

    @property
    def holds(self) -> bool:
        """True if both gaps are within the bound. (A NaN is not.)"""
        return all(gap.mean <= self.bound.mean and gap.high <= self.bound.high for gap in (self.sampled, self.scored))

    @property
    def sentence(self) -> str:
        """What came out, in one sentence."""
        if self.holds:
            return (
                f"proof: sampled and scored log-probabilities differ from the model's own forward pass by at most "
                f"{max(self.sampled.mean, self.scored.mean):.2g} nats a token ({self.compute} explains "
                f"{self.bound.mean:.2g})"
            )
        if not self.causal:
            return (
                f"policy.model: the forward pass of this {self.family} reads the tokens behind the one that it "
                "predicts, so it is no causal language model; take another model (or, if it was trained as one, write "
                "is_decoder: true into its config.json)"
            )
        return (
            f"policy.model: with this {self.family}, what is sampled differs from the model's own forward pass by "
            f"{self.sampled}, and what is scored by {self.scored}, where {self.compute} explains {self.bound}; lmgym "
            "would train on wrong log-probabilities, so take another model, or try policy.path: plain and "
            "policy.compute: float32 (engine.gap_at_load allows more)"
        )

    def check(self) -> None:
        """Raise LmgymError, naming the gaps, if they are above the bound."""
        if not self.holds:
            raise LmgymError(self.sentence)


def prove(policy: Policy, engine: Engine, most: float | None = None) -> Proof:
    """Sample a few tokens with the engine, score them with the policy, and compare both with the model's own forward
    pass in the precision of its parameters. `most` replaces the bound on the mean.

    The prompts are random ids that depend on the vocabulary alone. No generator of random numbers moves, and nothing of
    the policy or the engine changes. Raises LmgymError if the model cannot be sampled, scored or run at all.
    """
    family = str(policy.model.config.model_type)
    compute = str(policy.compute).removeprefix("torch.")
    kind = f"{family} in {compute}"
    try:
        batch = _attempt(kind, "sampled", lambda: sample(policy, engine))
        scored = _attempt(kind, "scored", lambda: policy.compute_logprobs_no_grad(batch).logprobs)
        own, spread = _attempt(kind, "run", lambda: own_logprobs(policy, batch))
    except LmgymError:
        check_finite(policy.model, policy.model.name_or_path)  # the likelier reason
        raise
    if not bool(own.isfinite().all()):
        check_finite(policy.model, policy.model.name_or_path)
    sampled = _gap(batch.require("logprobs_sampler"), own, batch)
    bound = bound_of(policy, spread, most)
    proof = Proof(family, compute, int(batch.actions.sum()), sampled, _gap(scored, own, batch), bound)
    return proof if proof.holds else replace(proof, causal=is_causal(policy, batch, own, bound))


def proofs_of(
    policy: Policy, engine: Engine, make_engine: Callable[[Policy], Engine], most: float | None = None
) -> list[Proof]:
    """`prove` for a policy and its engine. If the forward pass is less precise than the parameters, also before that in
    their precision, where a mistake cannot hide behind rounding: with an engine that `make_engine` makes."""
    proofs = []
    own = next(policy.model.parameters()).dtype
    if policy.compute != own:
        precise = copy.copy(policy)
        precise.compute = own
        proofs.append(prove(precise, make_engine(precise), most))
    return [*proofs, prove(policy, engine, most)]


def sample(policy: Policy, engine: Engine, temperature: float = 1.0) -> Batch:
    """A few answers to prompts of random ids. Stop ids are excluded, so that each answer has its full length. So are
    other special ids: many families number or mask their padding token apart, wherever it occurs."""
    rows = _prompts(policy)
    longest = max(len(prompt) for prompt, _ in rows)
    new = NEW if policy.context is None else max(min(NEW, policy.context - longest), 1)
    requests = [
        Request(prompt, seeds.key("proof", "answer", index), source_ids=source)
        for index, (prompt, source) in enumerate(rows)
    ]
    excluded = _special(policy)
    sampling = Sampling(temperature=temperature, max_new_tokens=new, min_new_tokens=new, stop_ids=excluded)
    episodes = []
    for index, answer in enumerate(engine.generate(requests, sampling)):
        prompt, source = rows[index]
        turn = Turn(list(prompt), answer.ids, answer.logprobs, min_new_tokens=new, source_ids=list(source))
        episodes.append(Episode(Example(f"proof/{index}", ""), index // ANSWERS, index, [turn]))
    return collate(episodes, policy.pad_id, temperature=temperature, stop_ids=excluded)


@torch.no_grad()
def own_logprobs(policy: Policy, batch: Batch) -> tuple[Float[Tensor, "N T"], float]:
    """What the model itself says of the batch's actions [N T] (zero elsewhere), in the precision of its parameters; and
    the standard deviation of its logits over the vocabulary, averaged over the actions."""
    batch = batch.to(policy.device)
    row, column = batch.actions.nonzero(as_tuple=True)
    logits = scoring.alone(policy, batch, row, column - 1)
    logprobs, _ = logprobs_of_logits(logits, batch, row, column, entropy=False)
    result = torch.zeros(batch.tokens.shape).index_put((row.cpu(), column.cpu()), logprobs.float().cpu())
    return result, float(logits.std(-1).mean())


def is_causal(policy: Policy, batch: Batch, own: Float[Tensor, "N T"], bound: Gap) -> bool:
    """True if the model's own pass says the same of the first half of each answer when the second half is missing (of
    most tokens: in a mixture of experts rounding may decide for some)."""
    place = batch.actions.cumsum(1)
    early = batch.mask & (place <= place.amax(1, keepdim=True) // 2)
    first = batch.replace(mask=early, actions=batch.actions & early)
    if not bool(first.actions.any()):
        return True
    alone, _ = own_logprobs(policy, first)
    return float((alone - own)[first.actions].abs().median()) <= bound.mean


def bound_of(policy: Policy, spread: float, most: float | None = None) -> Gap:
    """The gap that rounding explains, in nats per token: FACTOR * s * sqrt((a * e32^2 + r * e^2) / 12).

    A rounding is off by up to e / 2 of its number, with a variance of e^2 / 12, and variances of independent errors add
    up. a are the additions on the longest way through the network (the inputs of each layer, and the vocabulary), which
    are rounded to fp32, whose eps is e32; r are the layers, which round their outputs to the precision of the forward
    pass, whose eps is e. s is the size of what is rounded: the standard deviation of the logits, at least 1. A mixture
    of experts is judged by the mean alone: where two experts are as good as tied, rounding decides, and a few tokens
    take another way.
    """
    additions, layers = _rounding_steps(policy.model)
    variance = torch.finfo(torch.float32).eps ** 2 * (additions + policy.vocabulary)
    variance = (variance + torch.finfo(policy.compute).eps ** 2 * layers) / 12
    mean = most or FACTOR * max(1.0, spread) * math.sqrt(variance)
    return Gap(mean, math.inf if is_mixture(policy.model) else TAIL * mean)


def is_mixture(model: nn.Module) -> bool:
    """True if the model is a mixture of experts: a module of it is named so."""
    return any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())


def _rounding_steps(model: nn.Module) -> tuple[int, int]:
    """The additions on the longest way through a network, and its layers."""
    additions, layers = 0, 0
    for module in model.modules():
        own = [parameter.shape for parameter in module.parameters(recurse=False) if parameter.dim()]
        if isinstance(module, nn.Embedding):
            continue
        if own:  # the inputs of a quantized layer are not a dimension of its packed weight
            additions += getattr(module, "in_features", max(shape[-1] for shape in own))
        layers += not any(True for _ in module.children())
    return additions, layers


def _special(policy: Policy) -> tuple[int, ...]:
    """The special ids of the tokenizer and of the model's configuration, as long as other ids are left."""
    config: Any = policy.model.config.get_text_config(decoder=True)
    padding = getattr(config, "pad_token_id", None)
    special = {*policy.special_ids, policy.pad_id, *([padding] if isinstance(padding, int) else [])}
    fitting = tuple(sorted(token for token in special if 0 <= token < policy.vocabulary))
    return fitting if len(fitting) < policy.vocabulary else ()


def _prompts(policy: Policy) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompt's ids and the source's ids of each answer: random ids without special ones."""
    special = set(_special(policy))
    ordinary = [token for token in range(policy.vocabulary) if token not in special]
    rows = []
    for index, wanted in enumerate(LENGTHS):
        length = wanted if policy.context is None else max(min(wanted, policy.context - NEW), 1)
        drawn = seeds.uniforms([seeds.key("proof", "prompt", index)], 0, length)[0] * len(ordinary)
        ids = tuple(ordinary[int(place)] for place in drawn)
        rows += [(policy.decoder_start, ids) if policy.encoder_decoder else (ids, ())] * ANSWERS
    return rows


def _gap(ours: Float[Tensor, "N T"], own: Float[Tensor, "N T"], batch: Batch) -> Gap:
    difference = (ours.float().cpu() - own)[batch.actions.cpu()].abs()
    return Gap(float(difference.mean()), float(difference.quantile(QUANTILE)))


def _attempt(kind: str, done: str, function: Callable[[], T]) -> T:
    """The function's result. What goes wrong inside of a model has no common exception; it gets a sentence."""
    try:
        return function()
    except LmgymError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        other = "write policy.compute: float32, or " if "float32" not in kind else ""
        raise LmgymError(
            f"policy.model: a few short rows of text could not be {done} with this {kind}; {other}take another model "
            f"({reason})"
        ) from error
