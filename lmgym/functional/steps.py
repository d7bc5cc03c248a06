"""Scores of the steps of answers: where a step ends, and what the value function says there. A step is a turn."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lmgym.functional.shapes import Mask, PerRow, PerToken, TokenIds


def step_ends(actions: Mask, turn: TokenIds) -> Mask:
    """The last action of each turn of each row.

    Example: a prompt of one token, a step of two tokens and one of one
        >>> step_ends(torch.tensor([[False, True, True, True]]), torch.tensor([[0, 0, 0, 1]]))
        tensor([[False, False,  True,  True]])
    """
    follows = torch.zeros_like(actions)
    follows[:, :-1] = actions[:, 1:] & (turn[:, 1:] == turn[:, :-1])
    return actions & ~follows


def values_after(values: PerToken, last_values: PerRow, actions: Mask) -> PerToken:
    """The value of the state after each token, for rows whose actions stand side by side: that of the state before the
    next action, and `last_values` after a row's last one. Zero, or without meaning, elsewhere.

    Example: values_after(torch.tensor([[0.0, 3.0, 4.0]]), torch.tensor([5.0]), torch.tensor([[False, True, True]])) ->
        tensor([[3., 4., 5.]])"""
    width = actions.shape[1]
    after = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    last = (actions * torch.arange(width, device=actions.device)).max(1).values
    return after.scatter(1, last[:, None], last_values[:, None].to(values.dtype))


def first_wrong(right: Bool[Tensor, " S"], answer: Int[Tensor, " S"]) -> Int[Tensor, " A"]:
    """The number of the first step of each answer that is not right, from 0; -1 where all are. Steps in their order,
    answers in ascending order of their number.

    Example: first_wrong(torch.tensor([True, False, False, True]), torch.tensor([4, 4, 4, 7])) -> tensor([1, -1])"""
    found = []
    for number in torch.unique(answer).tolist():
        wrong = (~right[answer == number]).nonzero()[:, 0]
        found.append(int(wrong[0]) if len(wrong) else -1)
    return torch.tensor(found, dtype=torch.long)
