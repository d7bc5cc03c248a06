"""REINFORCE over turns, with clamped returns and a KL penalty to a reference that follows the policy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.base import Terms, UpdateContext
from lmgym.algorithms.regularised import Estimator, Regularised, check_group_baseline
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.losses import log_ratio, policy_gradient
from lmgym.functional.turn_discounts import turn_lengths, turn_means, turn_returns

LEAST_LOGPROB = math.log(1e-10)  # Source: LLM_RL, which clamps probabilities at 1e-10


@register("algorithm", "reinforce_stable")
@dataclass(kw_only=True)
class ReinforceStable(Regularised):
    """REINFORCE with clamped returns and a KL penalty. A step is a turn of the episode, of T tokens.

        G_k  = r_k + gamma G_{k+1}, then cut to [return_low, return_high]         over the turns k
        loss = mean over episodes of the sum over turns of the mean over the turn's tokens t of
               -(G_k - b) log pi(y_t) + (beta / T) (log pi(y_t) - log pi_ref(y_t))^2 / 2

    The KL term's gradient is beta / T (log pi - log pi_ref) grad log pi: that of beta times the turn's mean KL in nats
    per token, so beta is in reward per nat. The reference becomes a copy of the policy every `refresh_every` steps.
    Several optimizer steps on one batch are weighted by the ratio of the policies, which is not clipped.

    `compat: llm_rl` is that system's loss, in which the KL estimate is differentiated too and nothing is weighted.
    Source: LLM_RL, ReinforceStable, where a turn is a line of reasoning and there is no baseline.

    Example: {name: reinforce_stable, kl_coefficient: 0.25, refresh_every: 2}
    """

    gamma: Share = 0.99
    """Discount per turn."""
    return_low: float | None = 0.0
    """Returns below become this, so with 0 there is no negative one; null: no bound."""
    return_high: float | None = 10.0
    baseline: Literal["none", "group", "batch"] = "none"
    """Mean return of the group's or the batch's turns, subtracted from the cut returns."""
    refresh_every: PositiveInt = 2
    """Steps after which the reference becomes a copy of the policy again."""
    kl_coefficient: Coefficient = 0.25
    estimator_in_loss: ClassVar[Estimator] = "k2"
    kl_in: Literal["reward", "loss"] = "loss"
    compat: Literal["none", "llm_rl"] = "none"
    """llm_rl: the loss -u (G - beta (u - v)), u = log pi / T and v = log pi_ref / T, differentiated as it stands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.return_low is not None and self.return_high is not None and not self.return_low < self.return_high:
            raise LmgymError(
                f"algorithm.return_low is {self.return_low} and algorithm.return_high {self.return_high}; the first "
                "must be the smaller one"
            )
        check_group_baseline(self.baseline, self.group_size)
        if self.compat == "llm_rl" and (self.baseline != "none" or self.kl_in != "loss" or self.kl_estimator != "k2"):
            raise LmgymError(
                f"algorithm.compat is {self.compat}, whose loss has no baseline and a KL of its own; leave baseline, "
                "kl_in and kl_estimator out"
            )

    def advantages(self, batch: Batch) -> Batch:
        penalty = batch.rewards - self.penalised_rewards(batch)
        returns = self._cut(batch, self._returns(batch, batch.rewards))
        if self.kl_in == "reward":
            returns = returns - self._returns(batch, penalty)
        advantages = returns
        if self.baseline != "none":
            group = batch.group if self.baseline == "group" else torch.zeros_like(batch.group)
            means = turn_means(returns, batch.actions, batch.require("turn"), batch.episode, group)
            advantages = returns - batch.per_token(means)
        return batch.replace(advantages=advantages, returns=returns)

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        length = turn_lengths(batch.actions, batch.require("turn"), batch.episode).clamp(min=1)
        terms = self.regularising_terms(batch, new, "constant")
        if self.compat == "llm_rl":
            terms["policy"] = (self._differentiated_kl_loss(batch, new, length), "constant")
            terms.pop("kl", None)
            return terms, {}
        difference = log_ratio(new.logprobs, batch.require("logprobs_old"))
        ratio = difference.exp()
        # The gradient of -ratio * A, with the value of -A log pi.
        gain = policy_gradient(new.logprobs, batch.require("advantages"))
        terms["policy"] = (ratio.detach() * gain / length, "constant")
        if "kl" in terms:
            terms["kl"] = (terms["kl"][0] / length**2, "constant")
        return terms, {"ratio/mean": ratio, "kl/old": ratio - 1 - difference}

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        whole = self._returns(batch, batch.rewards)
        clamped = (self._cut(batch, whole) != whole)[batch.actions].double().mean()
        return {**super().metrics(batch), "return/clamped": float(clamped)}

    def after_update(self, context: UpdateContext) -> None:
        super().after_update(context)
        if self.requirements.reference and context.step % self.refresh_every == 0:
            context.refresh("reference")

    def _returns(self, batch: Batch, rewards: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        return turn_returns(rewards, batch.actions, batch.require("turn"), batch.episode, self.gamma)

    def _cut(self, batch: Batch, returns: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        if self.return_low is None and self.return_high is None:
            return returns
        return returns.clamp(self.return_low, self.return_high) * batch.actions

    def _differentiated_kl_loss(
        self, batch: Batch, new: PolicyOutputs, length: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"]:
        own, advantages = new.logprobs.clamp(min=LEAST_LOGPROB) / length, batch.require("advantages")
        if batch.logprobs_ref is None:
            return -own * advantages
        reference = batch.logprobs_ref.clamp(min=LEAST_LOGPROB) / length
        return -own * (advantages - self.beta * (own - reference))
