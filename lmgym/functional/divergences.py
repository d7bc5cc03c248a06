"""Divergences between a student's distribution p and a teacher's q over the whole vocabulary, and their gradients."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """A divergence D(p, q) of a student p from a teacher q, per token and in nats (GKD, arXiv 2306.13649, section 2).

    forward_kl  KL(q || p) = sum_v q log(q / p): p must cover all that q finds likely
    reverse_kl  KL(p || q) = sum_v p log(p / q): p may leave out some of it, and must avoid what q finds unlikely
    jsd         beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p: bounded, at beta 1/2 by log 2

    jsd / beta tends to forward_kl as beta tends to 0, and jsd / (1 - beta) to reverse_kl as it tends to 1. TRL takes
    the KLs themselves at these ends of the same scale.

    Example:
        >>> p, q = torch.tensor([[.7, .2, .1]]).log(), torch.tensor([[.5, .3, .2]]).log()
        >>> [round(Divergence(name).of(p, q)[0].item(), 4) for name in ("forward_kl", "reverse_kl", "jsd")]
        [0.092, 0.0851, 0.0219]
    """

    name: DivergenceName
    beta: float = 0.5

    def of(
        self, logprobs_p: Float[Tensor, "R V"], logprobs_q: Float[Tensor, "R V"]
    ) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
        """The divergence of each pair of distributions, and its gradient by the logits whose softmax is p.

        Tokens that neither distribution can give have -inf in both, and count for nothing.
        """
        p = logprobs_p.exp()
        if self.name == "forward_kl":
            q = logprobs_q.exp()
            return _mean(q, logprobs_q - logprobs_p), p - q
        if self.name == "reverse_kl":
            excess, factor = logprobs_p - logprobs_q, 1.0  # log p / q
            value = divergence = _mean(p, excess)
        else:
            factor = 1 - self.beta
            logprobs_m = torch.logaddexp(logprobs_q + math.log(self.beta), logprobs_p + math.log(factor))
            excess = logprobs_p - logprobs_m
            divergence = _mean(p, excess)
            value = self.beta * _mean(logprobs_q.exp(), logprobs_q - logprobs_m) + factor * divergence
        # d/dz_v of a sum over p's tokens is p_v (g_v - sum p g). Where p is 0 it is 0, and g is infinite or unknown.
        return value, factor * p * (excess - divergence[:, None]).masked_fill(p == 0, 0.0)


def _mean(probs: Float[Tensor, "R V"], values: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The sum of p * value. Where p is 0, the value may be infinite or unknown."""
    return (probs * values.masked_fill(probs == 0, 0.0)).sum(-1)
