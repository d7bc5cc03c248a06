"""Corrections: what the loss does about answers whose sampler was not quite the policy that trains.

pi_old / mu is the trainer's probability of a token before this batch's steps, over what the sampler said of it. The two
differ by rounding, by another engine's kernels, or because the weights that sampled are older (`engine.ahead`)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import PositiveFloat, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.parts import Part
from lmgym.core.registry import register
from lmgym.functional import importance
from lmgym.functional.importance import Outside
from lmgym.functional.losses import Level
from lmgym.functional.shapes import Mask, PerToken

Weight = tuple[PerToken, Mask]


@dataclass(frozen=True, kw_only=True)
class Correction(Part):
    """What the policy's term of each token weighs. Every correction can leave rows out besides.

    Example: Truncated(cap=2.0).weight(batch, new)"""

    kind: ClassVar[str] = "correction"
    section: ClassVar[str] = "algorithm.correction"

    corrects: ClassVar[bool] = False
    """True if the loss is right for answers of older weights."""
    weighs: ClassVar[bool] = False
    """True if `importance` gives a weight."""
    ratio_to_sampler: ClassVar[bool] = False
    """True if the ratio compares with what the sampler said of itself."""

    mismatch_bound: Annotated[float, Gt(1), Rule("it bounds a ratio and its inverse, so write 1.001 or so")] | None = (
        None
    )
    """Leave out rows whose geometric mean of pi_old / mu is above this or below its inverse."""
    off_policy_threshold: PositiveFloat | None = None
    """Leave out rows with A < 0 that are less likely now than when sampled, by more than this (nats per token)."""

    @property
    def reads_sampler(self) -> bool:
        """True if it needs the sampler's log-probabilities."""
        return self.weighs or self.leaves_out or self.ratio_to_sampler

    @property
    def leaves_out(self) -> bool:
        """True if it may leave rows out."""
        return self.mismatch_bound is not None or self.off_policy_threshold is not None

    def denominator(self, batch: Batch) -> PerToken:
        """The log-probabilities that the ratio divides by: the old policy's, or the sampler's."""
        return batch.require("logprobs_sampler" if self.ratio_to_sampler else "logprobs_old")

    def importance(self, old: PerToken, sampler: PerToken, batch: Batch) -> Weight:
        """The weight of each token, and where a bound has changed it."""
        raise NotImplementedError(f"{type(self).__name__} has no importance()")

    def weight(self, batch: Batch, new: PolicyOutputs) -> tuple[Tensor | float, dict[str, Tensor]]:
        """What the policy's term of each token weighs, and the metrics of that."""
        if not self.weighs and not self.leaves_out:
            return 1.0, {}
        old, sampler = batch.require("logprobs_old"), batch.require("logprobs_sampler")
        weight: Tensor | float = 1.0
        metrics = {}
        if self.weighs:
            weight, beyond = self.importance(old, sampler, batch)
            metrics["importance/capped"] = beyond.to(old.dtype)
        if self.leaves_out:
            left_out = torch.zeros_like(batch.actions)
            if self.mismatch_bound is not None:
                left_out |= importance.mismatched_rows(old, sampler, batch.actions, self.mismatch_bound)
            if self.off_policy_threshold is not None:
                left_out |= importance.off_policy_rows(
                    new.logprobs, sampler, batch.require("advantages"), batch.actions, self.off_policy_threshold
                )
            weight = weight * ~left_out
            metrics["importance/left_out"] = left_out.to(old.dtype)
        return weight, {"importance/mean": torch.as_tensor(weight), **metrics}


@register("correction", "none")
@dataclass(frozen=True, kw_only=True)
class Uncorrected(Correction):
    """The sampler is taken for the policy before this batch's steps."""


@register("correction", "sampler")
@dataclass(frozen=True, kw_only=True)
class SamplerRatio(Correction):
    """The ratio compares with what the sampler said of itself, not with the trainer's log-probabilities (prime-rl)."""

    corrects: ClassVar[bool] = True
    ratio_to_sampler: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _Bounded(Correction):
    """The policy's term weighs pi_old / mu within two bounds."""

    corrects: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    outside: ClassVar[Outside] = "truncate"

    cap: PositiveFloat | None = 2.0
    """The largest weight."""
    floor: PositiveFloat | None = None
    """The least."""
    level: Level = "token"
    """sequence: the product over the row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is None and self.floor is None:
            raise LmgymError("algorithm.correction bounds the weight by cap, floor or both, and has neither")
        if self.cap is not None and self.floor is not None and self.floor > self.cap:
            raise LmgymError(
                f"algorithm.correction.floor is {self.floor} and algorithm.correction.cap {self.cap}; the first must "
                "not be the larger one"
            )

    def importance(self, old: PerToken, sampler: PerToken, batch: Batch) -> Weight:
        return importance.importance_weight(old, sampler, batch.actions, self.level, self.floor, self.cap, self.outside)


@register("correction", "truncated")
@dataclass(frozen=True, kw_only=True)
class Truncated(_Bounded):
    """A ratio outside of the bounds weighs as much as the nearer one (truncated importance sampling)."""


@register("correction", "masked")
@dataclass(frozen=True, kw_only=True)
class Masked(_Bounded):
    """A ratio outside of the bounds weighs 0: the token, or the row, is left out (IcePop, arXiv 2510.18855)."""

    outside: ClassVar[Outside] = "mask"
