"""Nash-MD: learn to be preferred to a mixture of oneself and the reference (arXiv 2312.00886)."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lmgym.algorithms.reinforce import PolicyGradient
from lmgym.algorithms.requirements import Requirements, Rival
from lmgym.batch import Batch
from lmgym.core.constraints import Coefficient, Share
from lmgym.core.registry import register
from lmgym.functional.preferences import ordered


@register("algorithm", "nash_md")
@dataclass(kw_only=True)
class NashMD(PolicyGradient):
    """loss = -mean over episodes of (P(y > y') - 1/2 - beta sum_t log pi / ref (y_t)) * sum_t log pi(y_t)   (section 7)

    y' is sampled from the geometric mixture pi^(1 - mixture) ref^mixture, one to each prompt, and P is how likely y is
    the better one: sigmoid(R(y) - R(y')), or with preference: order 1, 1/2 or 0. beta is kl_coefficient.

    Example: NashMD(mixture=0.5, kl_coefficient=0.05)"""

    mixture: Share = 0.5
    """Share of the reference in the mixture; 0: self-play, 1: against the reference alone."""
    preference: Literal["sigmoid", "order"] = "sigmoid"
    """sigmoid: of the difference of the scores, as a reward model means it; order: which score is higher."""
    kl_coefficient: Coefficient = 0.05

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, rival=Rival(share=self.mixture))

    def advantages(self, batch: Batch) -> Batch:
        penalty = batch.score - self.penalised_score(batch)
        lead = batch.score - batch.require("baseline")
        preferred = torch.sigmoid(lead) if self.preference == "sigmoid" else ordered(lead)
        return batch.replace(advantages=batch.per_token(preferred - 0.5 - penalty))
