"""REINFORCE++ and its baseline form (arXiv 2501.03262): PPO's clip, no critic, advantages normalised globally."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.regularised import Regularised, check_group_baseline, clipped_objective
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, Share
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional.reductions import Reduction


@register("algorithm", "reinforce_pp")
@dataclass(kw_only=True)
class ReinforcePlusPlus(Regularised):
    """REINFORCE++ (arXiv 2501.03262, section 3).

        G_t  = sum over s >= t of gamma^(s - t) (reward_s - beta k1_s)        one step is one token
        A_t  = (G_t - mean) / sqrt(variance + 1e-8)                           over all tokens of the step
        loss = -mean over tokens of min(w_t A_t, clip(w_t, 1 - clip_low, 1 + clip_high) A_t)

    With `baseline: group` (REINFORCE++-baseline) the group's mean score is taken off an episode's last reward first,
    and the paper has the KL as a k2 term of the loss: `preset: baseline`. Variances are those of the population.

    Example: {name: reinforce_pp, preset: baseline, group_size: 8}"""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "openrlhf": {"kl_coefficient": 1e-4},
        "baseline": {"baseline": "group", "group_size": 8, "kl_estimator": "k2", "kl_in": "loss",
                     "kl_coefficient": 1e-5},
    }  # fmt: skip

    baseline: Literal["none", "group"] = "none"
    """group: the mean score of the answers to the same prompt."""
    gamma: Share = 1.0
    """Discount per token."""
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.2
    reduction: Reduction = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_baseline(self.baseline, self.group_size)

    def advantages(self, batch: Batch) -> Batch:
        rewards = self.penalised_rewards(batch)
        if self.baseline == "group":
            means = credit.group_means(batch.score, batch.episode, batch.group)
            rewards = rewards - credit.placed_on_last(means, batch.actions, batch.episode)
        row, column, steps = credit.episode_steps(batch.actions, batch.episode)
        dense = credit.discounted_returns(rewards[row, column], steps, self.gamma)
        shape = (batch.actions.shape[0], batch.actions.shape[1])
        returns = credit.scatter_steps(dense, row, column, steps, shape)
        advantages = credit.whiten(returns, batch.actions, unbiased=False, inside_root=True)
        return batch.replace(advantages=advantages, returns=returns)

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        policy, metrics = clipped_objective(batch, new, self.clip_low, self.clip_high)
        return {"policy": (policy, self.reduction), **self.regularising_terms(batch, new, self.reduction)}, metrics
