"""REINFORCE (Williams 1992) with a choice of baselines, and RLOO (arXiv 2402.14740)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.regularised import Regularised
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Rule, ShareBelowOne
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional.losses import policy_gradient


@dataclass(kw_only=True)
class PolicyGradient(Regularised):
    """What REINFORCE and RLOO share: one optimizer step per batch, along the policy gradient of each token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_step(type(self).__name__.lower(), "the same batch", ", or use grpo")

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        policy = policy_gradient(new.logprobs, batch.require("advantages"))
        return {"policy": (policy, "constant"), **self.regularising_terms(batch, new, "constant")}, {}


@register("algorithm", "remax")
@register("algorithm", "reinforce")
@dataclass(kw_only=True)
class Reinforce(PolicyGradient):
    """loss = -mean over episodes of (R - b) * sum_t log pi(y_t).

    The baseline b is one of
      none  0
      mean  the mean score of the batch, the episode itself included
      ema   m <- beta * m + (1 - beta) * batch mean, the first batch setting m; b is the m that already holds this batch
      scst  the score of the greedy answer to the same prompt (self-critical training, arXiv 1612.00563; ReMax, arXiv
            2310.10505, whose name means this baseline)

    The end-of-sequence token is trained, and the sampling temperature applies in the loss too.
    Source of the baselines: NanoRL's documentation; its code trains no end-of-sequence token and leaves the temperature
    out of the loss."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"remax": {"baseline": "scst"}}  # arXiv 2310.10505

    baseline: Literal["none", "mean", "ema", "scst"] = "mean"
    ema_beta: ShareBelowOne = 0.9
    """Memory of the ema baseline: higher weighs past rewards more."""
    moving_mean: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline == "scst" and self.kl_coefficient and self.kl_in == "reward":
            raise LmgymError(
                "algorithm.baseline is scst, the difference of two answers' scores, and a KL penalty in the reward "
                "would lower the score of the sampled one only; write kl_in: loss"
            )

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, greedy=self.baseline == "scst")

    def advantages(self, batch: Batch) -> Batch:
        score = self.penalised_score(batch)
        return batch.replace(advantages=batch.per_token(score - self._baseline(batch, score)))

    def _baseline(self, batch: Batch, score: Tensor) -> Tensor:
        if self.baseline == "none":
            return torch.zeros(())
        if self.baseline == "scst":
            return batch.require("baseline")
        mean = credit.batch_mean(score, batch.episode)
        if self.baseline == "ema":
            previous = float(mean) if self.moving_mean is None else self.moving_mean
            self.moving_mean = self.ema_beta * previous + (1 - self.ema_beta) * float(mean)
            return torch.tensor(self.moving_mean)
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "moving_mean": self.moving_mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.moving_mean = state["moving_mean"]


@register("algorithm", "rloo")
@dataclass(kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE whose baseline is the mean score of the other answers to the same prompt (arXiv 2402.14740, eq. 8).

    loss = -mean over episodes of (R - mean of the others) * sum_t log pi(y_t)"""

    group_size: Annotated[int, Ge(2), Rule("rloo needs at least 2 answers per prompt")] = 4

    def advantages(self, batch: Batch) -> Batch:
        per_row = credit.leave_one_out(self.penalised_score(batch), batch.episode, batch.group)
        return batch.replace(advantages=batch.per_token(per_row))
