"""Importance correction: what the loss of a token weighs, where the sampler's distribution was not the trainer's.

`old` are the trainer's log-probabilities with the weights that sampled, `sampler` (mu) what the sampler said of itself.
All weights are constants to the gradient, and 1 for tokens that are no actions."""

from typing import Literal

import torch

from lmgym.functional.losses import Level, importance_ratio, log_ratio, sequence_log_ratio
from lmgym.functional.shapes import Mask, PerToken

Outside = Literal["truncate", "mask"]


def bounded_weight(
    ratio: PerToken, low: float | None, high: float | None, outside: Outside = "truncate"
) -> tuple[PerToken, Mask]:
    """The weight that an importance ratio gives, and where the ratio lies outside of [low, high] (None: no bound).

    outside="truncate": the nearest bound (truncated importance sampling; IMPALA, arXiv 1802.01561, section 4.1).
    "mask": 0, so that the token, or with ratios of rows the whole row, is left out (masked importance sampling; with
    both bounds on tokens IcePop, arXiv 2510.18855).

    Example:
        >>> bounded_weight(torch.tensor([[0.1, 1.5, 7.0]]), 0.5, 5.0, "mask")
        (tensor([[0.0000, 1.5000, 0.0000]]), tensor([[ True, False,  True]]))
    """
    beyond = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        beyond = beyond | (ratio < low)
    if high is not None:
        beyond = beyond | (ratio > high)
    if outside == "mask":
        return torch.where(beyond, 0.0, ratio), beyond
    return ratio if low is None and high is None else ratio.clamp(low, high), beyond


def importance_weight(
    old: PerToken,
    sampler: PerToken,
    actions: Mask,
    level: Level,
    low: float | None,
    high: float | None,
    outside: Outside = "truncate",
) -> tuple[PerToken, Mask]:
    """`bounded_weight` of pi_old / mu of each action, or (level="sequence") of a row's product.

    Example: importance_weight(old, sampler, actions, "sequence", None, 3.0, "mask")[0]  # TRL's default"""
    return bounded_weight(importance_ratio(old, sampler, actions, level), low, high, outside)


def mismatched_rows(old: PerToken, sampler: PerToken, actions: Mask, bound: float) -> Mask:
    """True on the actions of rows whose geometric mean of pi_old / mu lies outside of [1 / bound, bound].

    Rejection by sequences: the mean does not grow with the length of the row, as the product does, so bounds are close
    to 1 (verl's rollout correction, `geometric`: 1.0002 to 1.001 by its documentation).

    Example: mismatched_rows(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.2, -1.2]]), torch.ones(1, 2).bool(), 1.1)
    -> tensor([[True, True]])"""
    mean = sequence_log_ratio(old.detach(), sampler, actions)
    return mean.exp().gt(bound) | mean.neg().exp().gt(bound)


def off_policy_rows(new: PerToken, sampler: PerToken, advantages: PerToken, actions: Mask, threshold: float) -> Mask:
    """True on the actions with A < 0 of rows whose mean of log mu - log pi_new exceeds the threshold (nats).

    The mean estimates KL(mu, pi_new). What the policy has left far behind teaches little by being wrong, and its
    gradient is large (DeepSeek-V3.2, arXiv 2512.02556, section 3.1: off-policy sequence masking).

    Example:
        >>> new, sampler, actions = torch.tensor([[-3., -2.]]), torch.tensor([[-1., -1.]]), torch.ones(1, 2).bool()
        >>> off_policy_rows(new, sampler, torch.tensor([[-1., 1.]]), actions, 1.0)
        tensor([[ True, False]])
    """
    count = actions.sum(1, keepdim=True).clamp(min=1)
    divergence = -(log_ratio(new.detach(), sampler) * actions).sum(1, keepdim=True) / count
    return (divergence > threshold) & (advantages < 0) & actions
