"""Choosing among several answers to a prompt: the best by a judge (best-of-n), and the vote of the majority."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from lmgym.core.errors import LmgymError


def best_of(values: Sequence[float], judged: Sequence[float], k: int) -> float:
    """The expected value of the answer that a judge likes best among k of the answers, drawn without replacement; of
    equally liked ones, any. Exact: the answer of rank r (from 1, the least liked) is the best of C(r - 1, k - 1) of the
    C(n, k) draws. If the judge is the value itself, 0 or 1, this is pass@k (arXiv 2107.03374, eq. 1).

    Example: of three pairs, two hold the answer that is liked best
        >>> round(best_of([1.0, 0.0, 0.5], judged=[0.2, 0.9, 0.1], k=2), 3)
        0.333
    """
    count = len(values)
    if not 1 <= k <= count:
        raise LmgymError(f"the best of {k} needs 1 <= k <= answers per prompt; there are {count}")
    # Equally liked answers stand for each other: each counts as the mean of them all.
    alike: dict[float, list[float]] = {}
    for value, liked in zip(values, judged, strict=True):
        alike.setdefault(liked, []).append(value)
    ranked = [sum(own) / len(own) for _, own in sorted(alike.items()) for _ in own]
    draws = [math.comb(rank, k - 1) for rank in range(count)]
    return sum(value * ways for value, ways in zip(ranked, draws, strict=True)) / math.comb(count, k)


def majority(values: Sequence[float], votes: Sequence[Hashable], k: int) -> float:
    """The mean value of what most of k answers vote for (maj@k; self-consistency, arXiv 2203.11171): the mean over the
    n // k runs of k answers, in their order. Votes of equal number share; a vote of None is no vote; a run without any
    vote is worth 0.

    Example: majority([0.0, 1.0, 1.0, 0.0], votes=["7", "8", "8", None], k=4) -> 1.0"""
    if not 1 <= k <= len(values):
        raise LmgymError(f"maj@{k} needs 1 <= k <= answers per prompt; there are {len(values)}")
    runs = range(0, len(values) // k * k, k)
    return sum(_elected(values[start : start + k], votes[start : start + k]) for start in runs) / len(runs)


def _elected(values: Sequence[float], votes: Sequence[Hashable]) -> float:
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    worth = [value for value, vote in zip(values, votes, strict=True) if counts.get(vote) == most and vote is not None]
    return sum(worth) / len(worth) if worth else 0.0
