"""TRPO: one step of a given divergence along the natural gradient, then regression of the value function.

The steps themselves are the driver's: updates/trust_region.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le, Lt

from lmgym.algorithms.actor_critic import ActorCritic
from lmgym.algorithms.base import ParameterGroup
from lmgym.core.constraints import Coefficient, PositiveFloat, PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register


@register("algorithm", "trpo")
@dataclass(kw_only=True)
class TRPO(ActorCritic):
    """Trust region policy optimisation (arXiv 1502.05477): how far a step goes is given as a divergence.

        maximise L = mean over tokens of r_t A_t   subject to   mean over tokens of KL(pi_old || pi_new) <= delta
        (F + damping) x = grad L;   step = sqrt(2 delta / x^T (F + damping) x) x, then shortened until both checks hold

    F is the exact Fisher matrix of the tokens' distributions. The optimizer section moves the critic alone."""

    driver: ClassVar[str] = "trust_region"
    optimized: ClassVar[tuple[ParameterGroup, ...]] = ("critic",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl4lms": {"gamma": 0.99, "gae_lambda": 0.95, "delta": 0.01, "damping": 0.1, "iterations": 15,
                   "critic_epochs": 10, "value_coefficient": 1.0},
    }  # fmt: skip

    gae_lambda: Share = 0.95
    delta: PositiveFloat = 0.01
    """Largest mean KL(old || new) of a step, in nats per token."""
    damping: Coefficient = 0.1
    """Added to the Fisher matrix's diagonal."""
    iterations: PositiveInt = 15
    """Most products with the Fisher matrix in the conjugate gradient."""
    line_search_steps: PositiveInt = 10
    """Most lengths that are tried."""
    line_search_factor: Annotated[float, Gt(0), Lt(1)] = 0.8
    """Each length over the one before it."""
    subsample: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the episodes that the Fisher matrix is of; gradient and checks always see all."""
    critic_epochs: PositiveInt = 10
    """Passes of the critic over each batch; the policy takes one step."""
    critic_minibatches: PositiveInt = 1
    """The critic's optimizer steps per pass (at most one per group)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer_steps > 1:
            raise LmgymError(
                "trpo takes one step of the policy per batch: set epochs and minibatches to 1, and critic_epochs and "
                "critic_minibatches for the critic"
            )
        if self.whiten == "minibatch":
            raise LmgymError("algorithm.whiten is minibatch, and trpo has no minibatches; write batch or none")
        if self.entropy_coefficient:
            raise LmgymError("trpo has no entropy bonus; set algorithm.entropy_coefficient to 0")
        if self.kl_in == "loss":
            raise LmgymError("trpo takes the KL to the reference out of the reward; write algorithm.kl_in: reward")
