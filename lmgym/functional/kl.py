"""Per-token estimators of KL(p || q) from samples of p, and updates of the coefficient of a KL penalty.

The estimators are Schulman's ("Approximating KL divergence", 2020). The mean of each over samples of p estimates the
divergence; k1 and k3 are unbiased. Their gradients differ, and the place of the penalty decides which one is right:

    in a reward (a constant to the gradient): the mean of k grad log p is the divergence's gradient for k1 alone; for
                                              k3 it is that of KL(p || q) - KL(q || p)
    in a loss (differentiated):               k2 has the divergence's gradient; k3 too, if it is multiplied by the
                                              ratio of the policy to the sampling policy; that of k1 is zero

Example: p = (0.7, 0.2, 0.1) and q = (0.5, 0.3, 0.2), by the logits of p. In the reward the cosine of what k penalises
with the divergence's gradient is 1 for k1, -0.84 for k2 and -0.87 for k3: a penalty of k2 or k3 drives p away from q.
"""

from lmgym.functional.shapes import PerToken


def k1(logprobs_p: PerToken, logprobs_q: PerToken) -> PerToken:
    """log p - log q, in nats: unbiased, may be negative."""
    return logprobs_p - logprobs_q


def k2(logprobs_p: PerToken, logprobs_q: PerToken) -> PerToken:
    """(log p - log q)^2 / 2: biased, low variance; its gradient is that of the divergence."""
    return (logprobs_p - logprobs_q) ** 2 / 2


def k3(logprobs_p: PerToken, logprobs_q: PerToken) -> PerToken:
    """exp(log q - log p) - (log q - log p) - 1: unbiased and never negative."""
    difference = logprobs_q - logprobs_p
    return difference.exp() - difference - 1


def proportional_update(coefficient: float, kl: float, target: float, rate: float = 0.1, bound: float = 0.2) -> float:
    """beta (1 + rate e), e = (kl - target) / target cut to +-bound, once per rollout (RL4LMs).

    `kl` and `target` are in nats per token (the mean log-ratio of the rollout).

    Example: round(proportional_update(0.1, kl=0.3, target=0.1), 6) -> 0.102"""
    return coefficient * (1 + rate * _error(kl, target, bound))


def horizon_update(
    coefficient: float, kl: float, target: float, horizon: float, samples: int, bound: float = 0.2
) -> float:
    """beta (1 + e samples / horizon), e = kl / target - 1 cut to +-bound: arXiv 1909.08593, section 2.2, and TRL.

    `kl` and `target` are in nats per answer there; `samples` answers were drawn since the last update.

    Example: round(horizon_update(0.2, kl=3.0, target=6.0, horizon=10_000, samples=16), 6) -> 0.199936"""
    return coefficient * (1 + _error(kl, target, bound) * samples / horizon)


def _error(kl: float, target: float, bound: float) -> float:
    """How far the KL is from its target, as a fraction of the target, cut to +-bound."""
    return min(max((kl - target) / target, -bound), bound)
