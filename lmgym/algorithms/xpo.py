"""XPO: online DPO that explores, against answers of the policy as it began (arXiv 2405.21046)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmgym.algorithms.dpo import DPO
from lmgym.algorithms.requirements import Requirements, Rival
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.preferences import episode_totals
from lmgym.types import Episode


@register("algorithm", "xpo")
@dataclass(kw_only=True)
class XPO(DPO):
    """loss = DPO's loss of the pairs + alpha * mean over prompts of log pi(y')        (algorithm 1 of the paper)

    A pair is an answer of the policy and y', one of its copy as the stage began, to the same prompt; the reward says
    which is better. Pairs of equal scores have no DPO loss. The second term makes the copy's answers less likely: the
    policy tries what the copy would not.

    Example: XPO(beta=0.1, alpha=1e-5)"""

    alpha: NonNegativeFloat = 1e-5
    """How much it explores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reference:
            raise LmgymError("algorithm.reference is false, and xpo compares with the policy as it began; remove it")
        if self.group_size != 1:
            raise LmgymError(f"algorithm.group_size is {self.group_size}; a pair of xpo has one answer of the policy")

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, answers="policy", rival=Rival(share=1.0, trains=True))

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The pairs of which both answers were played, and judged."""
        pairs = [group for group in groups if len(group) > 1]
        return pairs, not pairs

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        found, metrics = super().batch_loss(batch, new)
        totals = episode_totals(new.logprobs, batch.actions, batch.episode)
        # The rival's answer is the last episode of its group.
        last = torch.stack([batch.episode[batch.group == group].max() for group in torch.unique(batch.group)])
        rivals = torch.isin(torch.unique(batch.episode), last)
        return {**found, "exploration": self.alpha * totals[rivals].mean()}, metrics
