"""Numbers of a whole distribution over the vocabulary, which a pass can give beside log-probabilities, by name.

An algorithm asks for them (`Requirements.distribution_sums`) and reads `batch.distribution_sum(name)`, at each action
and without gradient. A new one is a function here and a row of SUMS."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class DistributionSum:
    """How a number is computed from R distributions: `of` takes their logits [R V], -inf for tokens that could not be
    sampled, and returns [R]. `whole`: it says nothing of answers that were sampled from a part of the vocabulary only.

    Example: SUMS["squared_probabilities"].of(torch.zeros(1, 4)) -> tensor([0.2500])"""

    of: Callable[[Float[Tensor, "R V"]], Float[Tensor, " R"]]
    whole: bool = False


def squared_probabilities(logits: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The sum of the squared probabilities: 1 for a distribution that is certain, 1 / V for one that is uniform."""
    return logits.softmax(-1).square().sum(-1)


def uniform_divergence(logits: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """KL(U || p) = -log V - mean over the vocabulary of log p, in nats: how far the uniform distribution U is from p.
    0 where p is uniform, without an upper bound. The self-certainty of a token (arXiv 2502.18581, section 3.2; arXiv
    2505.19590, eq. 4). Tokens of logit -inf, such as an end of sequence that was excluded, are not counted in V.

    Example: uniform_divergence(torch.tensor([[.7, .2, .1]]).log()) -> tensor([0.3243])"""
    possible = logits > -math.inf
    count = possible.sum(-1)
    mean = torch.where(possible, logits, 0.0).sum(-1) / count
    return (logits.logsumexp(-1) - mean - count.to(logits.dtype).log()).clamp(min=0)  # rounding may fall below


SUMS: Mapping[str, DistributionSum] = {
    "squared_probabilities": DistributionSum(squared_probabilities),
    "uniform_divergence": DistributionSum(uniform_divergence, whole=True),
}
