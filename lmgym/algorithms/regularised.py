"""The KL penalty to a frozen reference, and the entropy bonus."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from jaxtyping import Bool
from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, PositiveFloat, Rule
from lmgym.core.errors import LmgymError
from lmgym.functional import kl
from lmgym.functional.losses import clipped, clipped_surrogate, log_ratio
from lmgym.functional.reductions import Reduction, masked_mean
from lmgym.functional.shapes import PerRow, PerToken

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: Mapping[Estimator | None, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


@dataclass(kw_only=True)
class Regularised(Algorithm):
    """What every algorithm that samples shares: a KL penalty (k is one of functional/kl.py) and an entropy bonus.

    In the reward:  r_t <- r_t - beta k1(pi_old || pi_ref)_t, a constant to the gradient; k2 and k3 are refused, since
                    there they have the gradient of something else
    In the loss:    + beta w_t k(pi || pi_ref)_t, where w_t is the ratio pi / pi_old: k3 through the ratio too, so that
                    its gradient is the divergence's (k3 alone is biased); k2 times the ratio as a constant; k1 is
                    refused, since its gradient is zero on average
                    - entropy_coefficient * mean over tokens of the entropy (nats)"""

    entropy_coefficient: float = 0.0
    entropy_final_fraction: Annotated[float, Ge(0), Rule("it must be 0 or more (1: constant)")] = 1.0
    """The bonus falls linearly over the stage to this share of itself."""
    kl_coefficient: Coefficient = 0.0
    """beta at first; above 0 a frozen copy of the policy is kept as reference."""
    estimator_in_loss: ClassVar[Estimator] = "k3"
    """What `kl_estimator` is in the loss, where it is left out."""
    kl_estimator: Estimator | None = None
    """Left out: k1 in the reward; in the loss k3 (reinforce_stable: k2)."""
    kl_in: Literal["reward", "loss"] = "reward"
    kl_target: PositiveFloat | None = None
    """Adapt beta so that the measured KL approaches this (nats; per token if proportional, per answer if horizon)."""
    kl_controller: Literal["proportional", "horizon"] = "proportional"
    """proportional: beta follows the relative error (RL4LMs); horizon: slowed by kl_horizon (arXiv 1909.08593)."""
    kl_horizon: PositiveFloat = 10_000.0
    """The horizon controller moves beta by a factor of e^0.2 at most, about a fifth, in this many answers."""
    beta: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is not None and not self.kl_coefficient:
            raise LmgymError(
                "algorithm.kl_target needs a reference to measure the KL to, and with kl_coefficient 0 there is none; "
                "set kl_coefficient above 0"
            )
        if self.kl_estimator is None:
            self.kl_estimator = "k1" if self.kl_in == "reward" else self.estimator_in_loss
        if self.kl_in == "reward" and self.kl_estimator != "k1" and self.kl_coefficient:
            raise LmgymError(
                f"algorithm.kl_estimator is {self.kl_estimator}, and in the reward only k1 has the gradient of the KL; "
                "leave kl_estimator out, or write kl_in: loss"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coefficient:
            raise LmgymError(
                "algorithm.kl_estimator is k1, whose gradient in a loss is zero on average; write k2 or k3, "
                "or kl_in: reward"
            )
        self.beta = self.step_beta = self.kl_coefficient  # of the next step, and of the current one

    @property
    def formulas(self) -> Mapping[str, str]:
        found = dict(super().formulas)
        if self.kl_coefficient:
            estimate = f"{self.kl_estimator}: {ESTIMATORS[self.kl_estimator].__doc__}"
            if self.kl_in == "reward":
                found["rewards and R"] = f"less beta {estimate} p is pi_old, q the reference."
            else:
                found["kl"] = f"beta r {estimate} p is pi, q the reference, r = p / pi_old."
        if self.entropy_coefficient:
            found["entropy"] = "-entropy_coefficient H: the entropy of the token's distribution, in nats."
        return found

    @property
    def requirements(self) -> Requirements:
        penalised = self.kl_coefficient > 0
        return replace(
            super().requirements,
            entropy=self.entropy_coefficient != 0,
            reference=penalised,
            old_logprobs=penalised and (self.kl_in == "reward" or self.kl_target is not None),
        )

    def active(self, batch: Batch) -> Bool[Tensor, " N"]:
        """All rows, where a term of the loss does not depend on the advantage."""
        in_loss = self.entropy_coefficient or (self.kl_coefficient and self.kl_in == "loss")
        return batch.actions.any(1) if in_loss else super().active(batch)

    def penalised_rewards(self, batch: Batch) -> PerToken:
        """`batch.rewards` less the penalty, where it is in the reward; call it once per step, since it adapts beta."""
        penalty = self._penalty(batch)
        return batch.rewards if penalty is None else batch.rewards - penalty

    def penalised_score(self, batch: Batch) -> PerRow:
        """Each row's episode score less the penalty of all of that episode's tokens; call it once per step."""
        penalty = self._penalty(batch)
        if penalty is None:
            return batch.score
        _, episode = torch.unique(batch.episode, return_inverse=True)
        per_episode = penalty.new_zeros(int(episode.max()) + 1).index_add(0, episode, penalty.sum(1))
        return batch.score - per_episode[episode]

    def regularising_terms(self, batch: Batch, new: PolicyOutputs, reduction: Reduction) -> Terms:
        """ "kl" and "entropy", where they are in the loss. The entropy's mean is always over tokens."""
        terms: Terms = {}
        if self.kl_coefficient and self.kl_in == "loss":
            ratio = log_ratio(new.logprobs, batch.require("logprobs_old")).exp()
            weight = ratio if self.kl_estimator == "k3" else ratio.detach()
            penalty = ESTIMATORS[self.kl_estimator](new.logprobs, batch.require("logprobs_ref"))
            terms["kl"] = (self.step_beta * weight * penalty, reduction)
        if self.entropy_coefficient:
            coefficient = self.entropy_coefficient * self.scheduled(self.entropy_final_fraction)
            terms["entropy"] = (-coefficient * new.require("entropy"), "token")
        return terms

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"kl/coefficient": self.beta} if self.kl_coefficient else {}

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "kl_coefficient": self.kl_coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Without a target nothing moves beta. A question about the run (`lmgym what-if`) may have a coefficient of its
        own, and begins with it. Of older versions it is known only whether there was one."""
        beta, began = state["beta"], state.get("kl_coefficient", self.kl_coefficient if state["beta"] else 0.0)
        if self.kl_target is not None and began == self.kl_coefficient:
            self.beta = self.step_beta = beta

    def _penalty(self, batch: Batch) -> PerToken | None:
        """What the rewards lose, if anything; moves beta for the steps after this one, by the KL of this step."""
        self.step_beta = self.beta
        if batch.logprobs_ref is None or not self.kl_coefficient:
            return None
        if self.kl_in == "loss" and self.kl_target is None:
            return None
        old = batch.require("logprobs_old")
        measured = kl.k1(old, batch.logprobs_ref) * batch.actions
        if self.kl_target is not None:
            if self.kl_controller == "proportional":
                mean = float(masked_mean(measured, batch.actions))
                self.beta = kl.proportional_update(self.beta, mean, self.kl_target)
            else:
                episodes = int(torch.unique(batch.episode).numel())
                per_answer = float(measured.sum()) / episodes
                self.beta = kl.horizon_update(self.beta, per_answer, self.kl_target, self.kl_horizon, episodes)
        if self.kl_in == "loss":
            return None
        return self.step_beta * ESTIMATORS[self.kl_estimator](old, batch.logprobs_ref) * batch.actions


def clipped_objective(
    batch: Batch, new: PolicyOutputs, low: float, high: float
) -> tuple[PerToken, Mapping[str, Tensor]]:
    """PPO's clipped surrogate per token (`losses.clipped_surrogate`), and the metrics of the ratio."""
    advantages = batch.require("advantages")
    difference = log_ratio(new.logprobs, batch.require("logprobs_old"))
    ratio = difference.exp()
    cut = clipped(ratio, advantages, low, high)
    metrics = {"ratio/mean": ratio, "ratio/clipped": cut, "kl/old": ratio - 1 - difference}
    return clipped_surrogate(ratio, advantages, low, high), metrics


def check_group_baseline(baseline: str, group_size: int) -> None:
    """Raise LmgymError if the baseline is the mean of a group of one answer."""
    if baseline == "group" and group_size < 2:
        raise LmgymError(
            f"algorithm.baseline is group, and algorithm.group_size is {group_size}; the mean of a group needs at "
            "least 2 answers per prompt"
        )
