"""The `optimizer:` section of a recipe, and the optimizer that it describes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from lmgym.algorithms.base import Algorithm
from lmgym.core.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, ShareBelowOne
from lmgym.core.errors import LmgymError
from lmgym.core.validation import REFUSED, Section
from lmgym.distributed.parts import is_part, whole
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.updates.protocols import TrainablePolicy
from lmgym.updates.schedules import Schedule, depends_on_steps, share_of_peak


@dataclass(kw_only=True)
class OptimizerSection(Section):
    """The `optimizer:` section of a recipe: AdamW (arXiv 1711.05101) or RMSprop, and the learning rate as a function of
    the step.

    Example: OptimizerSection(learning_rate=1e-6, schedule="cosine", warmup=20)"""

    section = "optimizer"

    name: Literal["adamw", "adamw_8bit", "rmsprop"] = field(default="adamw", metadata=REFUSED)  # other moments
    """adamw_8bit: AdamW whose moments take a byte each (arXiv 2110.02861), by bitsandbytes."""
    learning_rate: NonNegativeFloat = 1e-6
    critic_learning_rate: NonNegativeFloat | None = None
    """Of the value function's own parameters; like the policy's if left out. Schedule and warm-up are the same."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """AdamW's."""
    alpha: ShareBelowOne = 0.99
    """RMSprop's memory of squared gradients."""
    epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    """On matrices only, not on biases and norms. AdamW decays the weights themselves, RMSprop adds to the gradient."""
    max_gradient_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this L2 norm; 0 switches it off (the norm is logged all the same)."""
    schedule: Schedule = "constant"
    """After the warm-up, by transformers' names (updates/schedules.py); constant_with_warmup is constant."""
    warmup: NonNegativeInt = 5
    """Steps over which the learning rate rises linearly from 1/warmup of itself."""
    warmup_ratio: Share | None = None
    """The same as a share of the stage's steps, rounded up, in place of warmup."""
    final_fraction: NonNegativeFloat = 0.0
    """Where falling schedules end, as a fraction of learning_rate (transformers' min_lr_rate)."""
    cycles: PositiveInt = 1
    """Of cosine_with_restarts."""
    power: PositiveFloat = 1.0
    """Of polynomial."""
    decay_fraction: Share = 0.1
    """Of warmup_stable_decay: the last share of the steps, over which the rate falls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cosine_with_min_lr" and not self.final_fraction:
            raise LmgymError(
                "optimizer.schedule: cosine_with_min_lr ends at a share of the rate; write it as final_fraction "
                "(min_lr / learning_rate), or take cosine"
            )
        if self.warmup_ratio is not None and self.warmup != OptimizerSection.warmup:
            raise LmgymError("optimizer.warmup and optimizer.warmup_ratio say the same twice; remove one of them")

    @property
    def depends_on_steps(self) -> bool:
        """True if a stage of more steps has another learning rate at the same step."""
        return depends_on_steps(self.schedule, self.warmup_ratio)

    def at(self, step: int, steps: int) -> float:
        """The learning rate of a step (counted from 0) of a stage of `steps`.

        A pure function, so a resumed run needs no scheduler state. Resuming with more steps continues on the longer
        stage's curve: the rate jumps where `depends_on_steps`."""
        warmup = self.warmup if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        shape = (self.cycles, self.power, self.decay_fraction)
        share = share_of_peak(self.schedule, step, steps, warmup, *shape)
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * share)


class Optimizer:
    """AdamW or RMSprop over the parameters of policy and critic; learning rates per step, one gradient norm of all."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        section: OptimizerSection,
        critic: Sequence[torch.nn.Parameter] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        self.section, self.ranks = section, ranks
        self.learning_rate = section.learning_rate  # of the policy, as the last `set_step` has set it
        self.parameters = [*parameters, *critic]
        own = section.critic_learning_rate
        peaks = (section.learning_rate, section.learning_rate if own is None else own)
        groups = [
            {"params": [p for p in owned if (p.dim() >= 2) == decays], "weight_decay": decay, "peak": peak}
            for owned, peak in zip((parameters, critic), peaks, strict=True)
            for decays, decay in ((True, section.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        self.torch: torch.optim.Optimizer
        rate, epsilon = section.learning_rate, section.epsilon
        if section.name == "rmsprop":
            self.torch = torch.optim.RMSprop(groups, lr=rate, alpha=section.alpha, eps=epsilon)
        elif section.name == "adamw_8bit":
            self.torch = _adamw_8bit(self.parameters)(groups, lr=rate, betas=section.betas, eps=epsilon)
        else:
            fused = self.parameters[0].device.type in ("cpu", "cuda")
            self.torch = torch.optim.AdamW(groups, lr=rate, betas=section.betas, eps=epsilon, fused=fused)

    def set_step(self, step: int, steps: int) -> float:
        """Set the learning rates of this training step, and return the policy's."""
        for group in self.torch.param_groups:
            group["lr"] = replace(self.section, learning_rate=group["peak"]).at(step, steps)
        self.learning_rate = self.section.at(step, steps)
        return self.learning_rate

    def zero_grad(self) -> None:
        """Gradients to None: the first that comes is kept, not added to zeros."""
        self.torch.zero_grad()

    def step(self) -> float:
        """Add the gradients of all ranks, clip, move the parameters, and return the gradient's L2 norm before clipping.
        Raises LmgymError, with the parameters untouched, if the gradient is not finite."""
        for parameter in self.parameters:
            if parameter.grad is None:  # a step without any signal is still a step (momentum, decay)
                parameter.grad = torch.zeros_like(parameter)
        # Of weights that are shared out, each rank has its part of the sum already.
        self.ranks.add(*(p.grad for p in self.parameters if p.grad is not None and not is_part(p)))
        limit = self.section.max_gradient_norm or float("inf")
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters, limit)))
        if not math.isfinite(norm):
            raise LmgymError(
                "the gradient is not finite, so the policy was left as it was; lower optimizer.learning_rate, "
                "or look at the last rollouts for a reward that explodes"
            )
        self.torch.step()
        torch.autograd.graph.increment_version(self.parameters)  # the fused AdamW does not say that it has changed them
        self.zero_grad()  # they make room for what sampling keeps
        return norm


def _adamw_8bit(parameters: Sequence[torch.nn.Parameter]) -> Any:
    """The class of bitsandbytes. Raises LmgymError where it is missing, or cannot work on these parameters."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise LmgymError(
            "optimizer.name: adamw_8bit needs the library bitsandbytes; pip install 'lmgym[quantised]'"
        ) from error
    if any(map(is_part, parameters)):
        raise LmgymError("optimizer.name: adamw_8bit moves whole weights, and here each rank has a part; write adamw")
    return bitsandbytes.optim.AdamW8bit


def make_optimizer(algorithm: Algorithm, policy: TrainablePolicy, section: OptimizerSection) -> Optimizer:
    """The optimizer over those parameters of a policy and its critic that the algorithm leaves to it.
    Example: make_optimizer(GRPO(), policy, OptimizerSection(learning_rate=1e-6))"""
    own = policy.parameters() if "policy" in algorithm.optimized else []
    critic = policy.critic_parameters() if "critic" in algorithm.optimized else []
    return Optimizer(own, section, critic, policy.ranks)
