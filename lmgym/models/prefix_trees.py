"""The prefix tree of rows of token ids: what rows share at their beginning is there once.

Such rows are prompts with the same system prompt, tools, rules or solved examples, and the sessions of an agent: one
that goes back to an earlier turn begins a row in which all that stood before is prompt. Pure functions of ids, without
a model (attention/tree.py runs a model on the tree)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

SHORTEST = 16  # tokens of a shared run that is worth its own calls of attention
WORTH = 0.9  # of the tokens that are computed otherwise: a tree must have fewer


@dataclass(frozen=True)
class PrefixTree:
    """N rows by their numbers, in the order of their ids as in a dictionary. Each begins with `shared` tokens of the
    one before it, and all behind them are its own: its tail. Tails joined are the tree in preorder: what follows a
    token in the tree stands behind it in one piece.

    Example: the rows [5, 6, 7, 8], [5, 6, 7, 9] and [5, 6, 4], of which the last comes first
        >>> tree = PrefixTree(rows=(2, 0, 1), lengths=(3, 4, 4), shared=(0, 2, 3))
        >>> tree.tokens, tree.offsets
        (6, [0, 3, 5])
        >>> tree.readers
        [(slice(0, 2, None), slice(3, 6, None)), (slice(3, 4, None), slice(5, 6, None))]
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def tails(self) -> list[int]:
        """The tokens that each row adds to the tree."""
        return [length - shared for length, shared in zip(self.lengths, self.shared, strict=True)]

    @property
    def tokens(self) -> int:
        """The tokens of the tree."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def offsets(self) -> list[int]:
        """Where each row's tail begins in the tree."""
        return [0, *accumulate(self.tails)][:-1]

    @cached_property
    def places(self) -> Int[Tensor, "N T"]:
        """Where each token of each row, in this order, is in the tree; behind a row's end without meaning."""
        column, number = torch.arange(max(self.lengths)), torch.arange(len(self.lengths))
        shared, offsets = torch.tensor(self.shared), torch.tensor(self.offsets)
        # The last row, up to this one, that does not share the token with the row before it.
        owner = torch.where(shared[:, None] <= column, number[:, None], 0).cummax(0).values
        return offsets[owner] + column - shared[owner]

    @cached_property
    def until(self) -> Int[Tensor, " L"]:
        """Behind each token, where the tokens end that follow it in the tree (on any way)."""
        until, tails = torch.empty(self.tokens, dtype=torch.long), self.tails
        later: list[tuple[int, int]] = [(0, self.tokens)]  # (depth, where a later row leaves at it), depths ascending
        for offset, shared, tail in reversed(list(zip(self.offsets, self.shared, tails, strict=True))):
            # The first later row that leaves the path at or before a token's depth ends what follows the token.
            depths = torch.tensor([depth for depth, _ in later])
            leaves = torch.tensor([place for _, place in later])
            depth = torch.arange(shared, shared + tail)
            until[offset : offset + tail] = leaves[torch.searchsorted(depths, depth, right=True) - 1]
            while later and later[-1][0] >= shared:
                later.pop()
            later.append((shared, offset))
        return until

    @cached_property
    def readers(self) -> list[tuple[slice, slice]]:
        """Each run of tokens that several rows share, and the tokens of later tails, which all attend to all of it."""
        found = []
        for offset, tail in zip(self.offsets, self.tails, strict=True):
            end = offset + tail
            until = self.until[offset:end].tolist()
            starts = [place for place in range(tail) if place == 0 or until[place] != until[place - 1]]
            for start, stop in pairwise([*starts, tail]):
                if until[start] > end:
                    found.append((slice(offset + start, offset + stop), slice(end, until[start])))
        return found


class OrderedRows:
    """Rows of ids in order, to make trees of any of them. `lengths`: how many of its tokens [N T] each row has.

    Example: a row, one that continues it, and another
        >>> rows = OrderedRows(torch.tensor([[*range(20), 0], [*range(21)], [5, *range(20)]]), [20, 21, 21])
        >>> rows.tree([1, 2, 0])
        PrefixTree(rows=(0, 1, 2), lengths=(20, 21, 21), shared=(0, 20, 0))
    """

    def __init__(self, tokens: Int[Tensor, "N T"], lengths: Sequence[int]) -> None:
        ids, self.lengths = tokens.cpu().numpy(), lengths
        # As bytes with the highest first, since these are compared faster than lists and in the same order.
        words = [row[:length].tobytes() for row, length in zip(ids.astype(">i8"), lengths, strict=True)]
        self.order = sorted(range(len(words)), key=words.__getitem__)
        self.place = {row: place for place, row in enumerate(self.order)}
        # Of 2^k neighbours in the order, for each k: the tokens that all of them begin with, read by the last of them.
        ends = np.asarray(lengths)[self.order]
        same = ids[self.order[1:]] == ids[self.order[:-1]]
        same &= np.arange(ids.shape[1]) < np.minimum(ends[1:], ends[:-1])[:, None]
        common = np.concatenate([[0], np.pad(same, ((0, 0), (0, 1))).argmin(1)])  # like the row before
        self.common = [common]
        for step in (2**k for k in range(len(common).bit_length() - 1)):
            last = self.common[-1]
            self.common.append(np.concatenate([last[:step], np.minimum(last[step:], last[:-step])]))

    def tree(self, rows: Iterable[int]) -> PrefixTree:
        """The tree of these rows. A shared run of fewer than SHORTEST tokens is computed in each row."""
        places = np.array(sorted(self.place[row] for row in rows))
        common = [0, *self._least(places[:-1], places[1:]).tolist()]
        shared, branches = [], [0]  # the depths at which rows have left the present path
        for same in common:
            while branches[-1] > same:
                branches.pop()
            if same - branches[-1] >= SHORTEST:
                branches.append(same)
            shared.append(branches[-1])
        chosen = tuple(self.order[place] for place in places.tolist())
        return PrefixTree(chosen, tuple(self.lengths[row] for row in chosen), tuple(shared))

    def worthwhile(self, rows: Sequence[int], otherwise: int) -> PrefixTree | None:
        """The tree of these rows, if it has clearly fewer tokens than would be computed `otherwise`.

        Example: rows.worthwhile([1, 2, 0], otherwise=62) is the tree above, of 42 tokens; with 45 it is None"""
        tree = self.tree(rows)
        return tree if tree.tokens < WORTH * otherwise else None

    def _least(self, one: Int[np.ndarray, " R"], other: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
        """The tokens that the rows at two places, of which the first is before the second, begin with."""
        least = np.zeros(len(one), int)
        level = np.frexp(other - one)[1] - 1  # 2^level is at most their distance
        for k in np.unique(level):
            at = level == k
            least[at] = np.minimum(self.common[k][other[at]], self.common[k][one[at] + 2**k])
        return least
