"""Packed rows as segments: runs of tokens that attend causally to themselves, and to all tokens of some spans before.

The kernels of models/kernels/training.cpp take every layout in this one form."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Span = tuple[int, int]  # the first of some packed tokens, and their number


@runtime_checkable
class InSegments(Protocol):
    """A layout that can say what it is in segments."""

    @property
    def segments(self) -> list[list[Span]]:
        """The spans that each segment sees, in the order of their positions; its own tokens are the last one.

        Example: a prompt of 4 tokens with answers of 2 and 3
            >>> BlockGroups([4], [2, 3], torch.tensor([0, 0]), torch.device("cpu")).segments
            [[(0, 4)], [(0, 4), (4, 2)], [(0, 4), (6, 3)]]
        """


def packed(segments: Sequence[Sequence[Span]]) -> tuple[Tensor, Tensor]:
    """Segments as the kernels read them: the number of each segment's first span [S + 1], and all spans [.. 2]."""
    counts = [0, *accumulate(len(spans) for spans in segments)]
    return torch.tensor(counts), torch.tensor([span for spans in segments for span in spans]).view(-1, 2)


def runs(places: Tensor) -> list[Span]:
    """Places of packed tokens as spans of adjacent ones. Example: runs(torch.tensor([3, 4, 9])) -> [(3, 2), (9, 1)]"""
    if not len(places):
        return []
    cuts = [0, *(torch.nonzero(places.diff() != 1)[:, 0] + 1).tolist(), len(places)]
    first = places.tolist()
    return [(first[begin], end - begin) for begin, end in pairwise(cuts)]
