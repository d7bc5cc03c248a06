"""Online DPO: pairs from the policy's own answers, judged by any reward (arXiv 2402.04792)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, NonNegativeFloat, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.preferences import PairObjective, best_and_worst, episode_totals, pair_loss
from lmgym.types import Episode


@register("algorithm", "online_dpo")
@dataclass(kw_only=True)
class OnlineDPO(Algorithm):
    """Of each group the best and the worst answer make a pair; groups of equal scores make none.

    loss = mean over pairs of l(h) + supervised_coefficient * (-log pi(chosen) per token)
    h = log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected), sums over tokens (length_norm: means)

    l is `objective`: DPO's sigmoid, IPO's square or SLiC's hinge (functional/preferences.py). Only the order of the
    scores counts.

    Example: SimPO on sampled pairs, which needs no reference:
        >>> build(OnlineDPO, OnlineDPO.presets["simpo"], "algorithm.")
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ipo": {"objective": "ipo", "length_norm": True},
        "simpo": {"reference": False, "length_norm": True, "beta": 2.0, "margin": 0.5},
    }

    group_size: PositiveInt = 2
    objective: PairObjective = "sigmoid"
    beta: Annotated[NonNegativeFloat, Ge(1e-6)] = 0.1
    """How sharply pairs are told apart; the larger, the closer the policy stays to the reference."""
    margin: Coefficient = 0.0
    """objective: sigmoid: how much larger than 0 beta h has to be (SimPO's gamma)."""
    label_smoothing: Annotated[NonNegativeFloat, Lt(0.5)] = 0.0
    """objective: sigmoid: the probability that a pair is the wrong way round."""
    length_norm: bool = False
    """Means over the tokens of an answer in the place of sums."""
    reference: bool = True
    """Compare with a frozen copy of the policy; false: with log-probabilities alone."""
    supervised_coefficient: NonNegativeFloat = 0.0
    """Weight of the chosen answers' mean negative log-likelihood per token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise LmgymError(f"algorithm.group_size is {self.group_size}; a pair needs at least 2 answers")
        if self.objective != "sigmoid" and (self.margin or self.label_smoothing):
            raise LmgymError(
                f"algorithm.margin and label_smoothing belong to objective: sigmoid, and objective is {self.objective}"
            )

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, reference=self.reference)

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The best and the worst of each group whose scores differ. Where none does, more prompts are drawn, and at
        last the first group stands in for a step that moves nothing."""
        pairs = [pair for group in groups if (pair := _best_and_worst(group))]
        return pairs or groups[:1], not pairs

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        # 1. Log-ratios of the episodes, and which of them make a pair.
        ratios = new.logprobs - batch.require("logprobs_ref") if self.reference else new.logprobs
        of_episode = episode_totals(ratios, batch.actions, batch.episode, mean=self.length_norm)
        first = torch.tensor([int((batch.episode == one).nonzero()[0]) for one in torch.unique(batch.episode)])
        chosen, rejected = best_and_worst(batch.score[first], batch.group[first])
        # 2. The loss of the pairs.
        difference = of_episode[chosen] - of_episode[rejected]
        losses = pair_loss(difference, self.objective, self.beta, self.margin, self.label_smoothing)
        count = max(len(chosen), 1)
        found = {"preference": losses.sum() / count}
        if self.supervised_coefficient:
            each = -episode_totals(new.logprobs, batch.actions, batch.episode, mean=True)[chosen]
            found["supervised"] = self.supervised_coefficient * each.sum() / count
        metrics = {
            "preference/accuracy": float((difference.detach() > 0).double().sum()) / count,
            "preference/margin": self.beta * float(difference.detach().double().sum()) / count,
        }
        return found, metrics


def _best_and_worst(group: list[Episode]) -> list[Episode]:
    """Empty if all scores are equal; of equals the earliest."""
    usable = [episode for episode in group if not episode.error]
    if len({episode.score for episode in usable}) < 2:
        return []
    best = max(usable, key=lambda episode: episode.score)
    return [best, min(usable, key=lambda episode: episode.score)]
