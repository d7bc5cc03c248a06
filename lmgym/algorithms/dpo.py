"""DPO: direct preference optimisation on given pairs (arXiv 2305.18290), with IPO, SLiC and SimPO as settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.pairs import Pairs
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, NonNegativeFloat
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.preferences import PairObjective, episode_totals, pair_loss


@register("algorithm", "dpo")
@dataclass(kw_only=True)
class DPO(Pairs):
    """loss = mean over pairs of l(h) + supervised_coefficient * (-log pi(chosen) per token)
    h = log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected), sums over tokens (length_norm: means)

    l is `objective`: DPO's sigmoid, IPO's square or SLiC's hinge (functional/preferences.py).

    Example: SimPO, which needs no reference:
        >>> build(DPO, DPO.presets["simpo"], "algorithm.")
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ipo": {"objective": "ipo", "length_norm": True},
        "simpo": {"reference": False, "length_norm": True, "beta": 2.0, "margin": 0.5},
    }

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective != "sigmoid" and (self.margin or self.label_smoothing):
            raise LmgymError(
                f"algorithm.margin and label_smoothing belong to objective: sigmoid, and objective is {self.objective}"
            )

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, reference=self.reference)

    def answer_scores(self, batch: Batch, new: PolicyOutputs) -> Float[Tensor, " E"]:
        ratios = new.logprobs - batch.require("logprobs_ref") if self.reference else new.logprobs
        return episode_totals(ratios, batch.actions, batch.episode, mean=self.length_norm)

    def pair_losses(
        self, chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], apart: Float[Tensor, " P"]
    ) -> Float[Tensor, " P"]:
        return pair_loss(chosen - rejected, self.objective, self.beta, self.margin, self.label_smoothing)


for preset in ("ipo", "simpo"):  # names that mean dpo with the preset of that name
    register("algorithm", preset)(DPO)
