"""Per-token loss terms, to be minimised. No reduction happens here."""

import torch
from jaxtyping import Float
from torch import Tensor


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
