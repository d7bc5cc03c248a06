"""Which tokens of a whole optimizer step train, or are penalised: quantiles and covariances over all of them."""

import torch

from lmgym.functional.reductions import masked_mean
from lmgym.functional.shapes import Mask, PerToken


def top_quantile(values: PerToken, mask: Mask, share: float) -> Mask:
    """True on the `share` of the mask's entries with the largest values: those at or above the quantile 1 - share.

    The quantile interpolates between two values (as torch.quantile). Of entropies: the tokens at which an answer forks
    (arXiv 2506.01939, with a share of 0.2).

    Example: top_quantile(torch.tensor([[.1, .9, .5, .7]]), torch.tensor([[1, 1, 1, 0]]).bool(), 0.5)
    -> tensor([[False,  True,  True, False]])"""
    own = values[mask].detach().sort().values
    if not len(own):
        return torch.zeros_like(mask)
    place = (1 - share) * (len(own) - 1)
    below = int(place)
    above = min(below + 1, len(own) - 1)
    threshold = own[below] + (place - below) * (own[above] - own[below])
    return (values.detach() >= threshold) & mask


def covariances(logprobs: PerToken, advantages: PerToken, mask: Mask) -> PerToken:
    """(log pi - mean log pi) (A - mean A), means over the mask; zero elsewhere (arXiv 2505.22617).

    Tokens where it is large, likely ones with a large advantage, are those that lower the entropy.

    Example: covariances(torch.tensor([[-1., -3.]]), torch.tensor([[1., 0.]]), torch.ones(1, 2).bool())
    -> tensor([[0.5000, 0.5000]])"""
    own = logprobs.detach()
    return (own - masked_mean(own, mask)) * (advantages - masked_mean(advantages, mask)) * mask


def share_of(count: int, share: float) -> int:
    """How many of `count` tokens a share is: rounded down, but one at least (verl, and the authors' code)."""
    return max(int(share * count), 1)


def largest(values: PerToken, mask: Mask, share: float) -> Mask:
    """True on the `share` of the mask's entries with the largest values, one at least.

    Example: largest(torch.tensor([[.1, .9, .5]]), torch.ones(1, 3).bool(), 0.5) -> tensor([[False,  True, False]])"""
    found = torch.zeros_like(mask)
    row, column = mask.nonzero(as_tuple=True)
    if not len(row):
        return found
    chosen = values[row, column].detach().topk(share_of(len(row), share)).indices
    found[row[chosen], column[chosen]] = True
    return found
