"""Per-token estimators of KL(p || q) from samples of p (Schulman, "Approximating KL divergence", 2020).

Means over samples of p of all three estimate the divergence; k1 and k3 without bias. Their gradients differ: k3 put
into a loss has a biased gradient unless it is multiplied by the ratio of the policy to the sampling policy.
"""

from jaxtyping import Float
from torch import Tensor


def k1(logprobs_p: Float[Tensor, "N T"], logprobs_q: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """log p - log q: unbiased, may be negative."""
    return logprobs_p - logprobs_q


def k2(logprobs_p: Float[Tensor, "N T"], logprobs_q: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """(log p - log q)^2 / 2: biased, low variance; its gradient is the divergence's."""
    return (logprobs_p - logprobs_q) ** 2 / 2


def k3(logprobs_p: Float[Tensor, "N T"], logprobs_q: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """exp(log q - log p) - (log q - log p) - 1: unbiased and never negative."""
    difference = logprobs_q - logprobs_p
    return difference.exp() - difference - 1
