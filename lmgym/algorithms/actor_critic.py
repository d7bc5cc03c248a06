"""PPO and A2C, and what every algorithm with a value function shares: GAE and a value loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxtyping import Bool
from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.regularised import Regularised, clipped_objective
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, PositiveFloat, PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional.losses import ValueClip, policy_gradient, value_loss
from lmgym.functional.reductions import Reduction
from lmgym.functional.turn_discounts import per_turn


@dataclass(kw_only=True)
class ActorCritic(Regularised):
    """Credit by a value function. Each token is a step of its episode; the tokens between two turns are none.

    r_t = rewards_t - beta (log pi_old(y_t) - log pi_ref(y_t))         algorithms/regularised.py
    A_t = sum_k (gamma lambda)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k})   GAE, arXiv 1506.02438
    value loss = value_coefficient * mean over tokens of (V_t - (A_t + V_t at sampling time))^2"""

    gamma: Share = 1.0
    """Discount per step."""
    gae_lambda: Share = 1.0
    """1: returns less values; lower trusts the critic more."""
    discount_per: Literal["token", "turn"] = "token"
    """What a step is for gamma and gae_lambda. turn: nothing is discounted between tokens of one turn."""
    whiten: Literal["none", "batch", "minibatch"] = "batch"
    """Shift and scale advantages to mean 0 and standard deviation 1, over the tokens of the step or of a minibatch."""
    value_coefficient: Coefficient = 0.5
    value_clip: PositiveFloat | None = None
    """Most that a value may leave the one at sampling time in one step; without it, plain squared error."""
    value_clip_form: ValueClip = "max"
    """clipped: as in stable-baselines3 (and RL4LMs); max: as in OpenAI's PPO2 and TRL (see functional/losses.py)."""
    norm_reward: bool = False
    """Whiten the rewards, KL penalty included, over the step's tokens before GAE (RL4LMs)."""
    bootstrap: bool = False
    """Add the critic's value after an episode that was cut off. Off, as a reward for the whole text has been paid."""

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, values=True)

    def advantages(self, batch: Batch) -> Batch:
        values, last_values = batch.require("values"), batch.require("last_values")
        rewards = self.penalised_rewards(batch)
        if self.norm_reward:
            rewards = credit.whiten(rewards, batch.actions, unbiased=False)
        row, column, steps = credit.episode_steps(batch.actions, batch.episode)
        last_row = row.gather(1, steps.sum(1, keepdim=True) - 1)[:, 0]
        cut = ~batch.terminated[last_row] & self.bootstrap
        # gamma and lambda, for all steps or for each.
        factors: Any = (self.gamma, self.gae_lambda)
        if self.discount_per == "turn":
            # Padding after an episode's end belongs to no turn (in the column it is 0, the number of the first turn).
            numbers, precision = batch.require("turn")[row, column].masked_fill(~steps, -1), batch.rewards.dtype
            factors = (per_turn(numbers, factor, precision) for factor in factors)
        dense = credit.gae(rewards[row, column], values[row, column], steps, last_values[last_row] * cut, *factors)
        shape = (batch.actions.shape[0], batch.actions.shape[1])
        advantages, returns = (credit.scatter_steps(one, row, column, steps, shape) for one in dense)
        if self.whiten == "batch":
            advantages = credit.whiten(advantages, batch.actions)
        return batch.replace(advantages=advantages, returns=returns)

    def active(self, batch: Batch) -> Bool[Tensor, " N"]:
        """All rows: one without any advantage still trains the value function."""
        return batch.actions.any(1)

    def shared_terms(self, batch: Batch, new: PolicyOutputs) -> Terms:
        """The value term, and the entropy bonus and the KL penalty where they are in the loss."""
        old, returns = batch.require("values"), batch.require("returns")
        error = value_loss(new.require("values"), old, returns, self.value_clip, self.value_clip_form)
        return {"value": (self.value_coefficient * error, "token"), **self.regularising_terms(batch, new, "token")}


@register("algorithm", "ppo")
@dataclass(kw_only=True)
class PPO(ActorCritic):
    """Proximal policy optimisation (arXiv 1707.06347): several epochs on each batch, with the ratio clipped.

        loss = -mean over tokens of min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
               + value loss - entropy bonus

    The presets `rl4lms` and `trl` hold the defaults of those systems."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl4lms": {"epochs": 10, "minibatches": 32, "gamma": 0.99, "gae_lambda": 0.95, "clip_high": 0.2,
                   "whiten": "minibatch", "value_clip_form": "clipped"},
        # value_coefficient: TRL's vf_coef of 0.1 times the half in its value loss
        "trl": {"epochs": 4, "gamma": 1.0, "gae_lambda": 0.95, "clip_high": 0.2, "value_coefficient": 0.05,
                "value_clip": 0.2, "kl_coefficient": 0.05},
    }  # fmt: skip

    epochs: PositiveInt = 4
    gae_lambda: Share = 0.95
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.2
    clip_final_fraction: Share = 1.0
    """The clip range falls linearly over the stage to this share of itself."""
    target_kl: PositiveFloat | None = None
    """Leave the rest of a step's updates out once the mean KL(old, new) exceeds 1.5 times this (stable-baselines3)."""

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        low, high = (self.scheduled(self.clip_final_fraction) * bound for bound in (self.clip_low, self.clip_high))
        policy, metrics = clipped_objective(batch, new, low, high)
        return {"policy": (policy, "token"), **self.shared_terms(batch, new)}, metrics

    def should_stop_early(self, metrics: Mapping[str, float]) -> bool:
        return self.target_kl is not None and metrics["kl/old"] > 1.5 * self.target_kl

    def before_minibatch(self, batch: Batch) -> Batch:
        if self.whiten != "minibatch":
            return batch
        return batch.replace(advantages=credit.whiten(batch.require("advantages"), batch.actions))


@register("algorithm", "a2c")
@dataclass(kw_only=True)
class A2C(ActorCritic):
    """Advantage actor-critic (arXiv 1602.01783): one step per batch, straight along the policy gradient.

        loss = -mean over tokens of A_t log pi(y_t) + value loss - entropy bonus

    The presets `rl4lms` and `nanorl` hold the defaults of those systems; with `nanorl` the policy term is a sum
    over tokens."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl4lms": {"gamma": 0.99, "gae_lambda": 1.0, "whiten": "none"},
        "nanorl": {"gamma": 1.0, "gae_lambda": 1.0, "whiten": "none", "reduction": "constant"},
    }

    whiten: Literal["none", "batch", "minibatch"] = "none"
    reduction: Reduction = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_step("a2c", "the same batch", ", or use ppo")
        if self.whiten == "minibatch":
            raise LmgymError("algorithm.whiten is minibatch, and a2c has no minibatches; write batch or none")

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        policy = policy_gradient(new.logprobs, batch.require("advantages"))
        return {"policy": (policy, self.reduction), **self.shared_terms(batch, new)}, {}
