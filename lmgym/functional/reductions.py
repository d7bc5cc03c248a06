"""From per-token terms to one loss: weights that do not depend on how a batch is split.

A loss is sum_t weight_t * term_t. The weights [N T] are computed once per optimizer step, from totals over all of its
rows on all ranks. So micro-batches, padding, row order and the number of ranks do not change the gradient."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.functional.advantages import sums
from lmgym.functional.shapes import Mask, PerRow, PerToken, RowIds

Reduction = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Totals:
    """Counts over one whole optimizer step.

    Example: two episodes of 3 and 1 actions: Totals(tokens=4, episodes=2)"""

    tokens: int
    episodes: int


def totals(actions: Mask, episode: RowIds) -> Totals:
    """The number of actions and of distinct episodes in these rows."""
    return Totals(tokens=int(actions.sum()), episodes=int(torch.unique(episode).numel()))


def tokens_of_episode(actions: Mask, episode: RowIds) -> PerRow:
    """The number of actions in each row's whole episode (all of its rows), float64 [N]."""
    _, inverse = torch.unique(episode, return_inverse=True)
    return sums(actions.sum(1).to(torch.float64), inverse)[inverse]


def weights(reduction: Reduction, actions: Mask, episode_tokens: PerRow, total: Totals) -> PerToken:
    """The weight of each token's term, float64 [N T], zero for tokens that are no actions.

    token: 1 / total tokens (DAPO, arXiv 2503.14476, eq. 8). sequence: 1 / (tokens of its episode * episodes), the mean
    over episodes of their means (GRPO, arXiv 2402.03300, eq. 3). constant: 1 / episodes, the mean over episodes of
    their sums (REINFORCE; Dr. GRPO, arXiv 2503.20783, which also divides its term by the length limit). Raises
    ValueError for another reduction."""
    if reduction == "token":
        per_row = torch.full_like(episode_tokens, 1.0 / max(total.tokens, 1))
    elif reduction == "sequence":
        per_row = 1.0 / (episode_tokens.clamp(min=1.0) * total.episodes)
    elif reduction == "constant":
        per_row = torch.full_like(episode_tokens, 1.0 / total.episodes)
    else:
        raise ValueError(f"reduction '{reduction}' is not one of token, sequence, constant")
    return per_row[:, None] * actions


def masked_mean(values: PerToken, mask: Mask) -> Float[Tensor, ""]:
    """Mean over the True entries of the mask; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
