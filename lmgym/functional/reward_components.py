"""Scores of several reward components: each is normalised separately before they are summed."""

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.functional.advantages import deviation, first_rows, group_centred
from lmgym.functional.shapes import PerRow, RowIds


def gdpo_advantages(
    components: Float[Tensor, "N P"],
    weights: Float[Tensor, " P"],
    episode: RowIds,
    group: RowIds,
    epsilon: float = 1e-4,
) -> PerRow:
    """S / (deviation of S in the batch + epsilon), where S = sum_k w_k (r_k - mean r_k) / (deviation r_k + epsilon).

    Mean and deviation of a component are those of the group (GDPO, arXiv 2601.05242, section 3): so its influence
    depends on its weight and not on its scale, and answers with the same sum but different components keep different
    advantages. Each group's S sums to zero, so the paper's shift by the batch's mean is left out. A group of equal
    answers gets exactly zero. Deviations are unbiased; epsilon is TRL's.

    Example: two answers; the first is right, the second is brief, and being right has twice the weight:
        >>> gdpo_advantages(torch.eye(2), torch.tensor([2., 1.]), torch.arange(2), torch.zeros(2, dtype=torch.long))
        tensor([ 0.7070, -0.7070])
    """
    normalised = [group_centred(component, episode, group, "group", epsilon) for component in components.unbind(1)]
    total = (torch.stack(normalised, 1) * weights).sum(1)
    return total / (deviation(total[first_rows(episode)]) + epsilon)
