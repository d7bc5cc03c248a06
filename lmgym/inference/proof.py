"""A model proves itself before it trains: what is sampled, what is scored and what the model itself says must agree.

A few tokens are sampled with the run's engine and scored as in training. Both are compared with the model's own forward
pass, called as Hugging Face's documentation calls it: each row alone, without padding, cache or positions. If they
differ by more than rounding explains, lmgym calls this model wrongly, and the run is refused. docs/models_proof.md has
the formula of the bound and a table of all families."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.inference.base import Engine, Request, Sampling
from lmgym.inference.parity import Parity, parity_of, trial
from lmgym.models import frozen_base
from lmgym.models.bound import Gap, bound_of, gap_of
from lmgym.models.device import give_memory_back
from lmgym.models.distributions import own_logprobs
from lmgym.models.integrity import check_finite
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

LENGTHS = (9, 4, 4)  # tokens of the prompts; two are of one length, so that some rows share a pass
SIZES = ((48, 32), None, (32, 56))  # of the picture in each prompt, of a model that reads pictures
ANSWERS = 2  # to each prompt, so that its keys and values are shared
NEW = 8  # tokens of an answer

T = TypeVar("T")


@dataclass(frozen=True)
class Proof:
    """The gaps of what was sampled and of what was scored to what the model itself says, and the bound on both.

    Example: proof = prove(policy, Sampler(policy)); proof.bound.mean, proof.holds -> (1.4e-05, True)"""

    family: str
    compute: str
    tokens: int
    sampled: Gap
    scored: Gap
    bound: Gap
    causal: bool = True  # False: the model's own pass reads the tokens after the one that it predicts
    parity: Parity | None = None  # of an exact policy

    @property
    def holds(self) -> bool:
        """True if both gaps are within the bound (a NaN is not), and no bit differs where none may."""
        exact = self.parity is None or self.parity.differing == 0
        return exact and self.sampled.within(self.bound) and self.scored.within(self.bound)

    @property
    def sentence(self) -> str:
        """What came out, in one sentence."""
        if self.holds:
            return (
                f"proof: sampled and scored log-probabilities differ from the model's own forward pass by at most "
                f"{max(self.sampled.mean, self.scored.mean):.2g} nats a token ({self.compute} explains "
                f"{self.bound.mean:.2g})" + ("" if self.parity is None else f"; {self.parity.sentence}")
            )
        if self.parity is not None and self.parity.differing:
            return (
                f"policy.parity: exact does not hold for this {self.family} on this machine: {self.parity.sentence}; "
                "remove it, or try another policy.compute"
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
    the policy or the engine changes. Raises LmgymError if the model cannot be sampled, scored or run at all."""
    family = str(policy.model.config.model_type)
    compute = str(policy.compute).removeprefix("torch.")
    kind = f"{family} in {compute}"
    try:
        batch = _attempt(kind, "sampled", lambda: sample(policy, engine))
        engine.release()
        scored = _attempt(kind, "scored", lambda: policy.compute_logprobs_no_grad(batch).logprobs)
        own, spread = _attempt(kind, "run", lambda: own_logprobs(policy, batch))
    except LmgymError:
        check_finite(policy.model, policy.model.name_or_path)  # the likelier reason
        raise
    if not bool(own.isfinite().all()):
        check_finite(policy.model, policy.model.name_or_path)
    sampled = gap_of(batch.require("logprobs_sampler"), own, batch.actions)
    bound = bound_of(policy, spread, most)
    proof = Proof(family, compute, int(batch.actions.sum()), sampled, gap_of(scored, own, batch.actions), bound)
    return proof if proof.holds else replace(proof, causal=is_causal(policy, batch, own, bound))


@doing("comparing what is sampled and scored")
def proofs_of(
    policy: Policy, engine: Engine, make_engine: Callable[[Policy], Engine], most: float | None = None
) -> list[Proof]:
    """`prove` for a policy and its engine. If the forward pass is less precise than the parameters, also before that in
    their precision, where a mistake cannot hide behind rounding: with an engine that `make_engine` makes."""
    proofs = []
    if policy.compute != policy.master:
        precise = policy.but(compute=policy.master)
        with frozen_base.widened(policy.model):
            proofs.append(prove(precise, make_engine(precise), most))
        give_memory_back()
    proof = prove(policy, engine, most)
    if policy.exact:
        special = _special(policy)
        ordinary = [token for token in range(policy.vocabulary) if token not in special]
        proof = replace(proof, parity=parity_of(policy, trial(policy, engine, ordinary)))
    return [*proofs, proof]


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


def _special(policy: Policy) -> tuple[int, ...]:
    """The special ids of the tokenizer and of the model's configuration, as long as other ids are left."""
    config: Any = policy.model.config.get_text_config(decoder=True)
    padding = getattr(config, "pad_token_id", None)
    special = {*policy.special_ids, policy.pad_id, *([padding] if isinstance(padding, int) else [])}
    special -= set(policy.never)  # these are excluded anyway
    fitting = tuple(sorted(token for token in special if 0 <= token < policy.vocabulary))
    return fitting if len(fitting) < policy.vocabulary else ()


def _prompts(policy: Policy) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompt's ids and the source's ids of each answer: random ids without special ones, with pictures among them
    if the model reads these and its context has room."""
    special = {*_special(policy), *policy.never}
    ordinary = [token for token in range(policy.vocabulary) if token not in special]
    rows = []
    for index, wanted in enumerate(LENGTHS):
        length = wanted if policy.context is None else max(min(wanted, policy.context - NEW), 1)
        drawn = seeds.uniforms([seeds.key("proof", "prompt", index)], 0, length)[0] * len(ordinary)
        ids = tuple(ordinary[int(place)] for place in drawn)
        size = SIZES[index]
        if policy.vision is not None and size is not None:
            tokens = policy.vision.reader.tokens_of(*_picture(size))
            room = (policy.context or 2**62) - NEW - length
            ids = (*ids[:3], *tokens, *ids[3:]) if len(tokens) <= room else ids
        rows += [(policy.decoder_start, ids) if policy.encoder_decoder else (ids, ())] * ANSWERS
    return rows


def draw_pictures(policy: Policy) -> None:
    """Let a policy have the pictures of these prompts, which no folder holds, before it is sent to another process."""
    _prompts(policy)


def _picture(size: tuple[int, int]) -> tuple[str, Any]:
    """A picture of this width and height, with colours that run across it, and a name for it."""
    from PIL import Image

    ramps = [Image.linear_gradient("L").rotate(90 * turn).resize(size) for turn in range(3)]
    return hashlib.sha256(f"proof {size}".encode()).hexdigest(), Image.merge("RGB", ramps)


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
