"""What algorithms share that learn from pairs: of each prompt the best answer against the worst."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat
from lmgym.functional.preferences import best_and_worst, episode_totals, ordered


@dataclass(kw_only=True)
class Pairs(Algorithm):
    """loss = mean over pairs of `pair_losses` + supervised_coefficient * (-log pi(chosen) per token)

    Of each group the answer with the highest score is the chosen one, that with the lowest the rejected one; of equal
    scores the first. Groups of equal scores make no pair. A subclass says how it scores an answer (`answer_scores`),
    and what a pair of such scores costs.

    Example: the chosen answer is to be more likely, and nothing else:
        >>> class Ranked(Pairs):
        ...     def answer_scores(self, batch, new):
        ...         return episode_totals(new.logprobs, batch.actions, batch.episode, mean=True)
        ...     def pair_losses(self, chosen, rejected, apart):
        ...         return torch.relu(rejected - chosen)
    """

    compares_pairs = True

    supervised_coefficient: NonNegativeFloat = 0.0
    """Weight of the chosen answers' mean negative log-likelihood per token."""

    @property
    def requirements(self) -> Requirements:
        return Requirements(answers="rated", pairs=True)

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def pair_losses(
        self, chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], apart: Float[Tensor, " P"]
    ) -> Float[Tensor, " P"]:
        """The loss of each pair, from the scores of its answers and how far apart their ratings are (above 0)."""
        raise NotImplementedError(f"{type(self).__name__} has no pair_losses()")

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        # 1. What each episode is worth to the policy, and which of them make a pair.
        scores = self.answer_scores(batch, new)
        first = torch.tensor([int((batch.episode == one).nonzero()[0]) for one in torch.unique(batch.episode)])
        ratings = batch.score[first]
        chosen, rejected = best_and_worst(ratings, batch.group[first])
        # 2. The loss of the pairs.
        count, apart = max(len(chosen), 1), ratings[chosen] - ratings[rejected]
        found = {"preference": self.pair_losses(scores[chosen], scores[rejected], apart).sum() / count}
        if self.supervised_coefficient:
            each = -episode_totals(new.logprobs, batch.actions, batch.episode, mean=True)[chosen]
            found["supervised"] = self.supervised_coefficient * each.sum() / count
        # 3. How the policy orders them now.
        better, worse = scores.detach().double()[chosen], scores.detach().double()[rejected]
        metrics = {
            "preference/accuracy": float(ordered(better - worse).sum()) / count,
            "preference/margin": float((better - worse).sum()) / count,
            "preference/chosen": float(better.sum()) / count,
            "preference/rejected": float(worse.sum()) / count,
        }
        return found, metrics
