"""A reward model from pairs (Bradley-Terry, arXiv 2009.01325): a number for each answer, higher for better."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.pairs import Pairs
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat
from lmgym.core.registry import register
from lmgym.functional.preferences import pair_loss


@register("algorithm", "reward_model")
@dataclass(kw_only=True)
class RewardModel(Pairs):
    """loss = mean over pairs of -log sigmoid(s(chosen) - s(rejected) - margin * (rating(chosen) - rating(rejected)))
           + centring * mean over pairs of (s(chosen) + s(rejected))^2
    s = the value head on the model's state after the last token, the end of sequence

    The run's final/ is the model with this head, as transformers' AutoModelForSequenceClassification reads it.

    Example: RewardModel(centring=0.01)"""

    margin: NonNegativeFloat = 0.0
    """How far apart scores should be for a rating that is higher by 1 (Llama 2, arXiv 2307.09288, eq. 2)."""
    centring: NonNegativeFloat = 0.0
    """Pulls the scores of a pair to a mean of 0 (arXiv 2312.09244, section 4.1); 0.01 is usual."""

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, values=True, makes="reward_model")

    def answer_scores(self, batch: Batch, new: PolicyOutputs) -> Float[Tensor, " E"]:
        last = [int((batch.episode == one).nonzero()[-1]) for one in torch.unique(batch.episode)]
        return new.require("last_values")[last]

    def pair_losses(
        self, chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], apart: Float[Tensor, " P"]
    ) -> Float[Tensor, " P"]:
        losses = pair_loss(chosen - rejected - self.margin * apart, "sigmoid", beta=1.0)
        return losses + self.centring * (chosen + rejected) ** 2
