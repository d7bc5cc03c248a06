"""Divergences between a student's distribution p and a teacher's q, over the whole vocabulary or over the teacher's K
most likely tokens and one bucket for all others, and their gradients."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]

SMALLEST_REST = 2.0**-23
"""Least probability of a teacher's other tokens: 1 less a sum of single-precision numbers is not known any better."""


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

        Tokens that neither distribution can give have -inf in both, and count for nothing."""
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

    def of_top(
        self, logprobs_p: Float[Tensor, "R V"], ids: Int[Tensor, "R K"], logprobs_q: Float[Tensor, "R K+1"]
    ) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
        """`of`, with all tokens but the K different ones in `ids` taken together as one outcome: the divergence of two
        distributions over K + 1 outcomes, and its gradient by the logits whose softmax over the vocabulary is p.

        The last column of `logprobs_q` is the log-probability of the others (`with_rest`). Taking outcomes together
        makes none of the divergences larger (data-processing inequality), so this is at most `of`; with K = V the two
        are equal. That of p's other tokens is summed from their own log-probabilities, not 1 less those of the K.

        Example:
            >>> p, q = torch.tensor([[.7, .2, .1]]).log(), torch.tensor([[.5, .3]]).log()
            >>> round(Divergence("reverse_kl").of_top(p, torch.tensor([[0, 1]]), with_rest(q))[0].item(), 4)
            0.0851
        """
        rest = logprobs_p.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
        everything = rest == -math.inf  # K = V: there are no others
        grouped_q = torch.cat([logprobs_q[:, :-1], logprobs_q[:, -1:].masked_fill(everything, -math.inf)], 1)
        value, by_grouped = self.of(torch.cat([logprobs_p.gather(1, ids), rest], 1), grouped_q)
        # A logit of the others moves their sum by its share in it.
        share = (logprobs_p - rest.masked_fill(everything, math.inf)).exp()
        return value, share.mul_(by_grouped[:, -1:]).scatter_(1, ids, by_grouped[:, :-1])

    def of_classes(
        self, logprobs_p: Float[Tensor, "R V"], classes: Int[Tensor, " V"], logprobs_q: Float[Tensor, "R K"]
    ) -> tuple[Float[Tensor, " R"], Float[Tensor, "R V"]]:
        """`of`, with the tokens of each of K classes taken together as one outcome, and its gradient by the logits
        whose softmax over the vocabulary is p. The last class is that of the rest; where p has no token in it, it does
        not count. At most the divergence over any finer classes (data-processing inequality).

        Example: with classes (0, 0, 1) p = (.4, .3, .3) counts as (.7, .3):
            >>> p, q = torch.tensor([[.4, .3, .3]]).log(), torch.tensor([[.5, .5]]).log()
            >>> round(Divergence("reverse_kl").of_classes(p, torch.tensor([0, 0, 1]), q)[0].item(), 4)
            0.0823
        """
        grouped = class_logprobs(logprobs_p, classes, logprobs_q.shape[1])
        rest = logprobs_q[:, -1:].masked_fill(grouped[:, -1:] == -math.inf, -math.inf)
        value, by_grouped = self.of(grouped, torch.cat([logprobs_q[:, :-1], rest], 1))
        # A logit of a class moves its sum by its share in it.
        own = grouped[:, classes]
        share = (logprobs_p - own.masked_fill(own == -math.inf, math.inf)).exp()
        return value, share.mul_(by_grouped[:, classes])

    def of_sample(
        self, logprobs_p: Float[Tensor, " R"], logprobs_q: Float[Tensor, " R"]
    ) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
        """An estimate of the divergence from one outcome that was drawn from p, whose log-probabilities under both are
        given, and the factor of grad log p(outcome) in its gradient.

        With w = q / p the divergences are E_p f(w), and their gradient is E_p[(f(w) - w f'(w)) grad log p] (the score
        function: f-divergences as in arXiv 1606.00709, table 1, differentiated by p). So both are unbiased:

        reverse_kl  f = -log w                            factor -log w
        forward_kl  f = w log w                           factor 1 - w
        jsd         f = beta w log(w / m) - (1 - beta) log m, m = beta w + 1 - beta    factor -(1 - beta) log m

        A constant in a factor changes no mean, since E_p grad log p is 0; it is such that each factor is 0 where p = q.
        That of forward_kl has no upper bound to its size; those of the others grow as log w only.

        Example: Divergence("reverse_kl").of_sample(torch.tensor([-1.]), torch.tensor([-3.])) -> ([2.], [2.])"""
        log_w = logprobs_q - logprobs_p
        if self.name == "reverse_kl":
            return -log_w, -log_w
        w = log_w.exp()
        if self.name == "forward_kl":
            return w * log_w, 1 - w
        factor = 1 - self.beta
        log_m = torch.logaddexp(log_w + math.log(self.beta), torch.full_like(log_w, math.log(factor)))
        return self.beta * w * (log_w - log_m) - factor * log_m, -factor * log_m


def class_logprobs(logprobs: Float[Tensor, "R V"], classes: Int[Tensor, " V"], count: int) -> Float[Tensor, "R K"]:
    """The log-probability of each of K = `count` classes, from those of their members; -inf for a class without any.

    Example: class_logprobs(torch.tensor([[.4, .3, .3]]).log(), torch.tensor([0, 0, 1]), 2).exp() -> [[.7, .3]]"""
    shape = (len(logprobs), count)
    top = logprobs.new_full(shape, -math.inf).scatter_reduce(1, classes.expand_as(logprobs), logprobs.detach(), "amax")
    finite = top.masked_fill(top == -math.inf, 0.0)
    return finite + logprobs.new_zeros(shape).index_add(1, classes, (logprobs - finite[:, classes]).exp()).log()


def with_rest(logprobs: Float[Tensor, "R K"]) -> Float[Tensor, "R K+1"]:
    """The log-probabilities of K outcomes, and behind them that of all others, log(1 - sum of the K probabilities).

    The sum is taken in fp64. Numbers in single precision leave it uncertain by about 2^-23 or less, and the others get
    at least that (`SMALLEST_REST`): so they are never impossible, and where they have less, they count as having 2^-23.

    Example: with_rest(torch.tensor([[.5, .3]]).log()).exp() -> [[.5, .3, .2]]"""
    total = logprobs.double().exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, (1 - total).clamp(min=SMALLEST_REST).log().to(logprobs.dtype)], -1)


def _mean(probs: Float[Tensor, "R V"], values: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The sum of p * value. Where p is 0, the value may be infinite or unknown."""
    return (probs * values.masked_fill(probs == 0, 0.0)).sum(-1)
