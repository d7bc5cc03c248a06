"""Per-token loss terms, to be minimised. No reduction happens here."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

ValueClip = Literal["clipped", "max"]


def policy_gradient(logprobs: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """-A log pi: its gradient is the score-function estimator (REINFORCE, Williams 1992, eq. 4)."""
    return -advantages * logprobs


def log_ratio(new: Float[Tensor, "N T"], old: Float[Tensor, "N T"], bound: float = 20.0) -> Float[Tensor, "N T"]:
    """log pi_new - log pi_old, clamped to +-bound so that one broken token cannot overflow the exponential."""
    return (new - old).clamp(-bound, bound)


def clipped_surrogate(
    ratio: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], clip_low: float, clip_high: float
) -> Float[Tensor, "N T"]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, eq. 7; unequal bounds: DAPO, arXiv
    2503.14476, eq. 10).

    Example:
        >>> clipped_surrogate(torch.tensor([[1.5, 0.5]]), torch.tensor([[1., 1.]]), 0.2, 0.28)
        tensor([[-1.2800, -0.5000]])
    """
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(
    ratio: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], clip_low: float, clip_high: float
) -> Float[Tensor, "N T"]:
    """1 where the clip is what the minimum chose, so that the token has no gradient; else 0."""
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return (too_high | too_low).to(ratio.dtype)


def value_loss(
    new: Float[Tensor, "N T"],
    old: Float[Tensor, "N T"],
    returns: Float[Tensor, "N T"],
    clip: float | None = None,
    form: ValueClip = "clipped",
) -> Float[Tensor, "N T"]:
    """(V - return)^2, not halved; with `clip`, V may leave the value at sampling time by `clip` at most.

    clipped: the error of V_old + clamp(V - V_old, -clip, clip) alone, so a value outside has no gradient
    (stable-baselines3, RL4LMs). max: the larger of the errors of V and of the clipped V, so that only a value which
    went too far the right way has none (OpenAI's PPO2, TRL). TRL halves it: give its coefficient times 0.5. Without
    `clip`, `old` and `form` are not read.

    Example:
        >>> value_loss(torch.tensor([[1., .5]]), torch.tensor([[.5, .6]]), torch.tensor([[1.2, .4]]), clip=0.2)
        tensor([[0.2500, 0.0100]])
    """
    if form not in ("clipped", "max"):
        raise ValueError(f"form '{form}' is not one of clipped, max")
    error = (new - returns) ** 2
    if clip is None:
        return error
    clipped_error = (old + (new - old).clamp(-clip, clip) - returns) ** 2
    return clipped_error if form == "clipped" else torch.maximum(error, clipped_error)
