"""ORPO: odds-ratio preference optimisation (arXiv 2403.07691), imitation and preferences in one stage."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.pairs import Pairs
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat
from lmgym.core.registry import register
from lmgym.functional.preferences import episode_totals, odds_ratio_loss


@register("algorithm", "orpo")
@dataclass(kw_only=True)
class ORPO(Pairs):
    """loss = mean over pairs of -log pi(chosen) per token - beta log sigmoid(log odds(chosen) / odds(rejected))
    odds = p / (1 - p), where log p is the mean log-probability per token of an answer

    It imitates the chosen answers and needs no reference, so it can begin with a model that was not trained on answers
    before (the paper's eq. 6; its lambda is beta).

    Example: ORPO(beta=0.2)"""

    beta: NonNegativeFloat = 0.1
    """Weight of the odds ratio."""
    supervised_coefficient: NonNegativeFloat = 1.0

    def answer_scores(self, batch: Batch, new: PolicyOutputs) -> Float[Tensor, " E"]:
        return episode_totals(new.logprobs, batch.actions, batch.episode, mean=True)

    def pair_losses(
        self, chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], apart: Float[Tensor, " P"]
    ) -> Float[Tensor, " P"]:
        return self.beta * odds_ratio_loss(chosen, rejected)
