"""How far two correct computations of a model's log-probabilities may lie apart: what rounding explains."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

QUANTILE = 0.95
FACTOR = 8.0  # of the bound over the error that independent roundings would add up to
TAIL = 5.0  # of the quantile over the mean; 2.5 if errors are normal


@dataclass(frozen=True)
class Gap:
    """Absolute differences of log-probabilities in nats: their mean over the tokens, and their 0.95 quantile.
    Example: Gap(mean=2e-7, high=6e-7)"""

    mean: float
    high: float

    def __str__(self) -> str:
        high = f" (0.95 quantile {self.high:.2g})" if math.isfinite(self.high) else ""
        return f"{self.mean:.2g} nats a token{high}"

    def within(self, bound: "Gap") -> bool:
        """True if neither number is above the bound's. (A NaN is.)"""
        return self.mean <= bound.mean and self.high <= bound.high


class Computed(Protocol):
    """What a bound depends on (models/language_model.py)."""

    model: nn.Module
    compute: torch.dtype
    vocabulary: int


def gap_of(ours: Float[Tensor, "N T"], theirs: Float[Tensor, "N T"], actions: Bool[Tensor, "N T"]) -> Gap:
    """The gap of two computations of the same log-probabilities, over the actions."""
    difference = (ours.float().cpu() - theirs.float().cpu())[actions.cpu()].abs()
    return Gap(float(difference.mean()), float(difference.quantile(QUANTILE)))


def bound_of(policy: Computed, spread: float, most: float | None = None) -> Gap:
    """The gap that rounding explains, in nats per token: FACTOR * s * sqrt((a * e32^2 + r * e^2) / 12).

    A rounding is off by up to e / 2 of its number, with a variance of e^2 / 12, and variances of independent errors add
    up. a are the additions on the longest way through the network (the inputs of each layer, and the vocabulary), which
    are rounded to fp32, whose eps is e32; r are the layers, which round their outputs to the precision of the forward
    pass, whose eps is e. s is the size of what is rounded: the standard deviation of the logits, at least 1. A mixture
    of experts is judged by the mean alone: where two experts are as good as tied, rounding decides, and a few tokens
    take another way."""
    additions, layers = _rounding_steps(policy.model)
    variance = torch.finfo(torch.float32).eps ** 2 * (additions + policy.vocabulary)
    variance = (variance + torch.finfo(policy.compute).eps ** 2 * layers) / 12
    mean = most or FACTOR * max(1.0, spread) * math.sqrt(variance)
    modules = policy.model.named_modules()
    mixture = any("expert" in f"{name} {type(module).__name__}".lower() for name, module in modules)
    return Gap(mean, math.inf if mixture else TAIL * mean)


def _rounding_steps(model: nn.Module) -> tuple[int, int]:
    """The additions on the longest way through a network, and its layers."""
    additions, layers = 0, 0
    for module in model.modules():
        own = [parameter.shape for parameter in module.parameters(recurse=False) if parameter.dim()]
        if isinstance(module, nn.Embedding):
            continue
        if own:  # the inputs of a quantized layer are not a dimension of its packed weight
            additions += getattr(module, "in_features", max(shape[-1] for shape in own))
        layers += not any(True for _ in module.children())
    return additions, layers
