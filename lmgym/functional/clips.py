"""Trust regions on ratios besides PPO's clip (functional/losses.py): each token's ratio, weight or term."""

import math

import torch

from lmgym.functional.losses import sequence_log_ratio
from lmgym.functional.shapes import Mask, PerToken


def token_log_ratio_of_sequence(new: PerToken, old: PerToken, actions: Mask) -> PerToken:
    """The value of `sequence_log_ratio`, with the gradient of each token's own log-probability; zero elsewhere.

    Its exponential is GSPO-token's ratio sg(s) pi / sg(pi) (arXiv 2507.18071, section 4.3): GSPO's where all tokens of
    a row share an advantage, and right where they do not."""
    return (sequence_log_ratio(new, old, actions).detach() + new - new.detach()) * actions


def geometric_mean_ratio(
    log_ratio: PerToken, advantages: PerToken, actions: Mask, low: float, high: float
) -> tuple[PerToken, Mask]:
    """GMPO's ratio of a row on each of its actions (zero elsewhere), and the tokens whose log-ratio was clipped.

    The exponential of the mean of the log-ratios, each first cut to at most `high` where A > 0, or else to at least
    -`low` (arXiv 2507.20673). The bounds are of log-ratios: 0.4 allows ratios up to e^0.4. Tokens with A = 0 in a row
    where others have an advantage have been left out: they are not in the mean.

    Example:
        >>> ones = torch.ones(1, 2)
        >>> ratio, cut = geometric_mean_ratio(torch.tensor([[.2, .8]]), ones, ones.bool(), 0.4, 0.4)
        >>> ratio.log(), cut
        (tensor([[0.3000, 0.3000]]), tensor([[False,  True]]))
    """
    up = advantages > 0
    kept = torch.where(up, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    chosen = actions & (advantages != 0)
    chosen = torch.where(chosen.any(1, keepdim=True), chosen, actions)
    mean = (kept * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp(min=1)
    cut = ((log_ratio > high) & up) | ((log_ratio < -low) & (advantages < 0))
    return mean.exp() * actions, cut & actions


def gradient_preserving_clip(
    ratio: PerToken, advantages: PerToken, clip_low: float, clip_high: float, keep_low: float, keep_high: float
) -> tuple[PerToken, Mask]:
    """CE-GPPO's term, and where PPO would have clipped (arXiv 2509.20712).

    -r A inside; outside, on the side where PPO's gradient is 0, the ratio's value is the bound times `keep_low` (below,
    A < 0) or `keep_high` (above, A > 0), and its gradient is that of the log-probability times this value.

    Example: gradient_preserving_clip(torch.tensor([[1.5, 0.5]]), torch.tensor([[1., -1.]]), 0.2, 0.28, 0.75, 1.0)[0]
    -> tensor([[-1.2800,  0.6000]])"""
    above, below = (ratio > 1 + clip_high) & (advantages > 0), (ratio < 1 - clip_low) & (advantages < 0)
    gradient = ratio / ratio.detach()  # 1, with the gradient of the log-probability
    highest, lowest = (ratio.new_tensor(value) for value in (keep_high * (1 + clip_high), keep_low * (1 - clip_low)))
    bound = torch.where(above, highest, lowest)
    return -torch.where(above | below, bound * gradient, ratio) * advantages, above | below


def gamma_weight(
    log_ratio: PerToken,
    advantages: PerToken,
    actions: Mask,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> PerToken:
    """VESPO's weight of a row, without gradient, on each of its actions: w^k exp(lambda (1 - w)) (arXiv 2602.10693).

    w is the ratio of the whole row's probabilities, at least 1e-8 and at most e^20 (as in the authors' code and TRL);
    (k, lambda) is `positive` where A >= 0, else `negative`. It is 1 at w = 1, largest at w = k / lambda, and falls to 0
    on both sides of that.

    Example: gamma_weight(torch.tensor([[0.3, 0.2]]), torch.ones(1, 2), torch.ones(1, 2).bool(), (2., 3.), (3., 2.))
    -> tensor([[0.3882, 0.3882]])"""
    total = (log_ratio.detach().clamp(-20.0, 20.0) * actions).sum(1, keepdim=True)
    total = total.clamp(math.log(1e-8), 20.0)
    pairs = zip(positive, negative, strict=True)
    power, rate = (torch.where(advantages >= 0, total.new_tensor(a), total.new_tensor(b)) for a, b in pairs)
    return (power * total + rate * (1 - total.exp())).exp() * actions


def probability_mask(new: PerToken, old: PerToken, bound: float) -> Mask:
    """True for tokens whose probability differs from the old one by more than `bound`, whatever their advantage.

    prime-rl's `ipo` loss; `losses.dppo_mask` looks at one side only. `old` is the sampler there.

    Example: probability_mask(torch.tensor([[.9, .1]]).log(), torch.tensor([[.7, .15]]).log(), 0.1)
    -> tensor([[ True, False]])"""
    return (new.detach().exp() - old.exp()).abs() > bound
