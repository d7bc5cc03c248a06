"""Tokens of one text by two tokenizers, grouped by the spans that both cut alike. N rows; T and U tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Spans(NamedTuple):
    """The span of each token, counted through all rows: of the R actions of a policy and the S of its teacher; how many
    of the policy's tokens each of G spans has; and which tokens are in a span of one token on both sides (`single`), or
    of more on one of them (`longer`). The others are in none.

    Example: match_spans(batch.span, batch.actions, read.span, read.actions).single"""

    own: Int[Tensor, " R"]
    other: Int[Tensor, " S"]
    sizes: Int[Tensor, " G"]
    single: Bool[Tensor, " R"]
    longer: Bool[Tensor, " R"]
    other_single: Bool[Tensor, " S"]
    other_longer: Bool[Tensor, " S"]


def match_spans(
    own: Int[Tensor, "N T"], actions: Bool[Tensor, "N T"], other: Int[Tensor, "N U"], others: Bool[Tensor, "N U"]
) -> Spans:
    """The spans of the policy's actions and of the teacher's, from their numbers in each row (0: in none).

    Example: a row "cats" as c|at|s and as cat|s:
        >>> found = match_spans(torch.tensor([[1, 1, 2]]), torch.ones(1, 3).bool(),
        ...                     torch.tensor([[1, 2]]), torch.ones(1, 2).bool())
        >>> found.single.tolist(), found.longer.tolist(), found.other_single.tolist()
        ([False, False, True], [True, True, False], [False, True])
    """
    width = 1 + int(max(own.max(), other.max()))
    rows = torch.arange(len(own), device=own.device)[:, None] * width
    inside, other_inside = own[actions] > 0, other[others] > 0
    number, other_number = (own + rows)[actions], (other + rows)[others]
    sizes, other_sizes = (torch.bincount(one, minlength=len(own) * width) for one in (number, other_number))
    single = (sizes == 1) & (other_sizes == 1)
    longer = (sizes > 0) & (other_sizes > 0) & ~single
    return Spans(
        number,
        other_number,
        sizes,
        inside & single[number],
        inside & longer[number],
        other_inside & single[other_number],
        other_inside & longer[other_number],
    )
