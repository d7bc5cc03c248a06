"""How far two lists of numbers agree in their order."""

from collections.abc import Sequence

import numpy as np


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, -1 to 1: Pearson's correlation of the ranks, of which equal numbers share the mean.
    NaN if all numbers of a list are equal.

    Example: spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7])  # 0.8207826816681233 (scipy's, too)"""
    ranks = [_ranks(np.asarray(numbers, dtype=np.float64)) for numbers in (one, other)]
    centred = [own - own.mean() for own in ranks]
    size = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / size) if size else float("nan")


def _ranks(numbers: np.ndarray) -> np.ndarray:
    below = (numbers[:, None] > numbers[None, :]).sum(1)
    equal = (numbers[:, None] == numbers[None, :]).sum(1)
    return below + (equal + 1) / 2
