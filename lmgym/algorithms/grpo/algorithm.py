"""GRPO (group-relative policy optimisation, arXiv 2402.03300): credit x surrogate x correction x choice of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.grpo import former
from lmgym.algorithms.grpo.correction import Correction, Uncorrected
from lmgym.algorithms.grpo.group_relative import GroupRelative
from lmgym.algorithms.grpo.members import MEMBERS
from lmgym.algorithms.grpo.surrogate import Clip, Surrogate
from lmgym.algorithms.grpo.tokens import AllTokens, Tokens
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, FormerKey
from lmgym.core.errors import LmgymError
from lmgym.core.parts import check_part, documentation, part_name
from lmgym.core.registry import register
from lmgym.functional import losses
from lmgym.functional.reductions import Reduction, masked_mean, tokens_of_episode, totals, weights


@register("algorithm", "grpo")
@dataclass(kw_only=True)
class GRPO(GroupRelative):
    """loss = sum_t -min(r_t A, clip(r_t, 1 - low, 1 + high) A) / tokens, A = R - mean of the group.

    Four parts say what a member of the family is: `credit` (where A is from), `surrogate` (what the loss makes of r and
    A), `correction` (the sampler was not quite the policy) and `tokens` (which of them train). The plain name centres
    without dividing by the group's standard deviation (arXiv 2503.20783), sums over the tokens of the whole optimizer
    batch and clips asymmetrically (arXiv 2503.14476), and has no reference model. The preset `paper` is the first
    paper's own form; the others are names of algorithms as well: {name: dapo, group_size: 8}.

    Example: {name: grpo, group_size: 8, surrogate: {name: cispo, high: 4.0}, minibatches: 4}"""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MEMBERS

    surrogate: Surrogate = Clip()  # noqa: RUF009 (frozen)
    """What the loss makes of ratio and advantage."""
    correction: Correction = Uncorrected()  # noqa: RUF009 (frozen)
    """What is done about answers whose sampler was not quite the policy that trains."""
    tokens: Tokens = AllTokens()  # noqa: RUF009 (frozen)
    """Which tokens train."""
    squared_log_ratio_coefficient: Annotated[Coefficient, FormerKey("drift_coefficient")] = 0.0
    """Weight of (log r_t)^2 in the loss, on tokens with an advantage (arXiv 2602.02276)."""
    reduction: Literal["token", "sequence", "constant", "limit"] = "token"
    """How terms are averaged (functional/reductions.py). limit: constant, divided by max_new_tokens (Dr. GRPO)."""
    kl_in: Literal["reward", "loss"] = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, value in ((Surrogate, self.surrogate), (Correction, self.correction), (Tokens, self.tokens)):
            check_part(kind, value)
        self.tokens.check(self.surrogate)
        self.surrogate.check(
            f"credit: {part_name(self.credit)}" if self.credit.of_tokens else None,
            f"tokens: {part_name(self.tokens)}" if self.tokens.leaves_some_out else None,
        )
        if self.surrogate.weighs_rows and self.correction.weighs:
            raise LmgymError(
                "algorithm.correction weighs tokens, and this surrogate weighs whole rows by itself; write correction: "
                "sampler in its place"
            )
        _check_own_loss(self)

    @classmethod
    def in_present_keys(cls, name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The keys of a recipe, those from before the parts (`clip_high: 0.3`) turned into parts."""
        preset = given.get("preset", name if name in cls.presets else None)
        return former.in_parts(given, cls, cls.presets.get(preset, {}) if isinstance(preset, str) else {}, where)

    @property
    def formulas(self) -> Mapping[str, str]:
        """What the parts say; of a subclass its docstring too, and that alone if it has written its own loss."""
        found = dict(super().formulas)
        if type(self).loss is not GRPO.loss:
            return found
        if type(self) is GRPO:  # its docstring is about the plain name
            found.pop("loss")
        found["policy"] = documentation(type(self.surrogate))
        if type(self.correction) is not Uncorrected:
            found["correction"] = documentation(type(self.correction))
        if type(self.tokens) is not AllTokens:
            found["tokens"] = documentation(type(self.tokens))
        if self.squared_log_ratio_coefficient:
            found["drift"] = "squared_log_ratio_coefficient (log r)^2 where A is not 0 (arXiv 2602.02276)"
        return found

    @property
    def requirements(self) -> Requirements:
        required = super().requirements
        return replace(required, entropy=required.entropy or self.tokens.reads_entropy)

    @property
    def weighs_old(self) -> bool:
        return self.correction.corrects and type(self).loss is GRPO.loss

    def advantages(self, batch: Batch) -> Batch:
        self._check_columns(batch)
        return super().advantages(batch)

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        # How much each token's policy term weighs, and what its ratio compares with.
        weight, metrics = self.correction.weight(batch, new)
        batch = batch.replace(logprobs_old=self.correction.denominator(batch))
        difference = losses.log_ratio(new.logprobs, batch.require("logprobs_old"))
        # The terms: policy, KL and entropy, drift.
        policy, measured = self.surrogate.checked_term(batch, new, difference)
        terms: Terms = {"policy": (weight * policy, self._reduction)}
        terms |= self.regularising_terms(batch, new, self._reduction)
        if self.squared_log_ratio_coefficient:
            drift = self.squared_log_ratio_coefficient * difference**2 * (batch.require("advantages") != 0)
            terms["drift"] = (drift, self._reduction)
        return self._scaled(batch, terms), {**metrics, **measured, "kl/old": difference.exp() - 1 - difference}

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """The same loss, where tokens are chosen by a look at all of the step's."""
        actions, old = batch.actions, self.correction.denominator(batch)
        # Those that are not chosen lose their advantage, or the chosen ones are penalised.
        chosen = self.tokens.chosen(batch, new, old, self.surrogate)
        advantages = batch.require("advantages") * self.tokens.trains(chosen)
        terms, metrics = self.loss(batch.replace(advantages=advantages), new)
        penalties = self.tokens.penalty(chosen, new, old)
        terms |= self._scaled(batch, {name: (term, self._reduction) for name, term in penalties.items()})
        # What a driver would do with the terms of one micro-batch.
        total, episode_tokens = totals(actions, batch.episode), tokens_of_episode(actions, batch.episode)
        reduced = {
            name: (weights(how, actions, episode_tokens, total) * term).sum() for name, (term, how) in terms.items()
        }
        means = {name: float(masked_mean(value.detach(), actions)) for name, value in metrics.items()}
        return reduced, means | {"tokens/chosen": float(masked_mean(chosen.double(), actions))}

    @property
    def whole_batch(self) -> bool:
        written = type(self).batch_loss is not GRPO.batch_loss  # by a subclass
        return written or self.tokens.looks_at_all

    @property
    def _reduction(self) -> Reduction:
        return "constant" if self.reduction == "limit" else self.reduction

    def _scaled(self, batch: Batch, terms: Terms) -> Terms:
        """With `reduction: limit` the sums over tokens, divided by the limit; else the terms as they are."""
        if self.reduction != "limit":
            return terms
        assert batch.limit is not None  # see _check_columns
        scale = {"constant": 1.0 / batch.limit}
        return {name: (scale.get(how, 1.0) * term, how) for name, (term, how) in terms.items()}

    def _check_columns(self, batch: Batch) -> None:
        """Raise LmgymError where the batch lacks what a part asks for; the trainer's own batches have it."""
        if batch.logprobs_sampler is None and self.correction.reads_sampler:
            raise LmgymError(
                "algorithm.correction needs the sampler's log-probabilities, and some turn of this batch has none"
            )
        if self.reduction == "limit" and batch.limit is None:
            raise LmgymError("algorithm.reduction: limit needs the token limit of an answer; give collate(limit=...)")


def _check_own_loss(algorithm: GRPO) -> None:
    """Raise LmgymError where a subclass has written its own `loss` and a part is set that only GRPO's reads."""
    own = type(algorithm).loss
    code = getattr(own, "__code__", None)
    if own is GRPO.loss or code is None or "__class__" in code.co_freevars:  # the last: it may call super().loss()
        return
    for name in ("surrogate", "correction", "tokens", "squared_log_ratio_coefficient", "reduction"):
        if name not in code.co_names and getattr(algorithm, name) != GRPO.__dataclass_fields__[name].default:
            raise LmgymError(
                f"algorithm.{name} is read by GRPO's loss, and {type(algorithm).__name__} has written its own; remove "
                f"the key, or extend GroupRelative, which does not have it"
            )


for member in MEMBERS:  # names that mean grpo with the preset of that name
    if member != "paper":
        register("algorithm", member)(GRPO)
