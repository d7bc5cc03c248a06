"""Packed rows as segments: runs of tokens that attend causally to themselves, and to all tokens of some spans before.

The kernels of models/kernels/training.cpp take every layout in this one form."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.packed import Layout, PackedRows
from lmgym.models.attention.tree import BlockTree

Span = tuple[int, int]  # the first of some packed tokens, and their number


def segments_of(layout: Layout) -> list[list[Span]] | None:
    """The spans that each segment of a layout sees, in the order of their positions; its own tokens are the last one.
    None for a layout of another kind.

    Example: a prompt of 4 tokens with answers of 2 and 3
        >>> segments_of(BlockGroups([4], [2, 3], torch.tensor([0, 0]), torch.device("cpu")))
        [[(0, 4)], [(0, 4), (4, 2)], [(0, 4), (6, 3)]]
    """
    if isinstance(layout, BlockRows):
        return _of_rows(layout)
    if isinstance(layout, BlockGroups):
        prompts, cut = _of_rows(layout.prompts), layout.prompt_tokens
        starts, lengths = (layout.answers.offsets + cut).tolist(), layout.answers.lengths
        answers = zip(layout.prompt_of_row.tolist(), starts, lengths, strict=True)
        shared = dict(enumerate(_of_rows(layout.prompts, empty=True)))
        return prompts + [[*shared[prompt], (start, length)] for prompt, start, length in answers if length]
    if isinstance(layout, BlockTree):
        return [[*_runs(row[: len(row) - (tail.stop - tail.start)]), (tail.start, tail.stop - tail.start)]
                for tail, row in layout.rows]  # fmt: skip
    return None


def packed(segments: Sequence[Sequence[Span]]) -> tuple[Tensor, Tensor]:
    """Segments as the kernels read them: the number of each segment's first span [S + 1], and all spans [.. 2]."""
    counts = [0, *accumulate(len(spans) for spans in segments)]
    return torch.tensor(counts), torch.tensor([span for spans in segments for span in spans]).view(-1, 2)


def _of_rows(rows: PackedRows, empty: bool = False) -> list[list[Span]]:
    return [[(offset, length)] for offset, length in zip(rows.offsets.tolist(), rows.lengths, strict=True)
            if length or empty]  # fmt: skip


def _runs(places: Tensor) -> list[Span]:
    """Places as spans of adjacent ones."""
    if not len(places):
        return []
    cuts = [0, *(torch.nonzero(places.diff() != 1)[:, 0] + 1).tolist(), len(places)]
    first = places.tolist()
    return [(first[begin], end - begin) for begin, end in pairwise(cuts)]
