"""Which rows of a batch go through the model together, and on which rank."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lmgym.batch import Batch
from lmgym.distributed.ranks import Ranks
from lmgym.models import scoring
from lmgym.models.skeleton import Skeleton


class PassingModel(scoring.ScoringModel, Protocol):
    """What is asked of a policy here (models/language_model.py describes each member)."""

    tokens_per_forward: int
    enough_tokens: int | None
    ranks: Ranks
    skeleton: Skeleton | None


def micro_batches(model: PassingModel, batch: Batch) -> list[Int[Tensor, " R"]]:
    """The row numbers of each forward pass of this rank, within `tokens_per_forward` (one row may exceed it alone).
    Groups stay together, longest first: so rows of similar length, and rows that share a prompt, are computed together.
    A group that fits in one pass is not split, so its prompt is computed once; others join it up to `enough_tokens`.

    Of several ranks each has its own groups, about equal numbers of tokens; whatever is summed over the passes must be
    added over the ranks (`Policy.ranks`). If each rank holds a part of the weights, all make equally many passes: the
    last ones may be idle, without any row (`Batch.idle`)."""
    # 1. Order the rows by their group's longest row.
    lengths = batch.mask.sum(1).cpu()
    if batch.source_mask is not None:
        lengths = lengths + batch.source_mask.sum(1).cpu()
    groups, group_of_row = torch.unique(batch.group.cpu(), return_inverse=True)
    longest = torch.zeros(len(groups), dtype=torch.long).scatter_reduce(0, group_of_row, lengths, "amax")
    order = np.lexsort((group_of_row.numpy(), -longest[group_of_row].numpy()))  # stable within a group
    by_group = [list(rows) for _, rows in groupby(order.tolist(), key=group_of_row.tolist().__getitem__)]
    tokens_of = scoring.tokens_of_pass(model, batch, lengths)
    # 2. Of several ranks, each has its share of the groups (of the rows, if there are too few groups).
    if len(by_group) < model.ranks.size:
        by_group = [[row] for rows in by_group for row in rows]
    shares = model.ranks.shares(by_group, [tokens_of(rows) for rows in by_group])
    limits = model.tokens_per_forward, min(model.tokens_per_forward, model.enough_tokens or model.tokens_per_forward)
    own = _passes(shares[model.ranks.rank], tokens_of, *limits)
    # 3. Where the weights are put together for each pass, all ranks make as many as the one with the most.
    if model.skeleton is not None:
        most = max(len(_passes(share, tokens_of, *limits)) for share in shares)
        own += [[]] * (most - len(own))
    return [torch.tensor(rows, dtype=torch.long) for rows in own]


def _passes(
    groups: list[list[int]], tokens_of: Callable[[Sequence[int]], int], most: int, enough: int
) -> list[list[int]]:
    """Fill one pass after the other, with whole groups up to `enough` tokens, or where a group has more than `most`,
    row by row."""
    parts: list[tuple[list[int], int]] = []
    for rows in groups:
        whole = tokens_of(rows) <= most
        parts += [(part, enough if whole else most) for part in ([rows] if whole else [[row] for row in rows])]
    passes = []
    while parts:
        count = _fitting(parts, tokens_of)
        passes.append([row for rows, _ in parts[:count] for row in rows])
        parts = parts[count:]
    return passes


def _fitting(parts: Sequence[tuple[list[int], int]], tokens_of: Callable[[Sequence[int]], int]) -> int:
    """How many of these parts fit in a pass together, one at least: each with the tokens up to which it may join. Tries
    1, 2, 4, ... more and halves, since to count the tokens of each number of parts would be quadratic."""

    def fits(count: int) -> bool:
        limit = min(limit for _, limit in parts[1:count])
        return tokens_of([row for rows, _ in parts[:count] for row in rows]) <= limit

    count = step = 1
    while count + step <= len(parts) and fits(count + step):
        count, step = count + step, 2 * step
    while step > 1:
        step //= 2
        if count + step <= len(parts) and fits(count + step):
            count += step
    return count
