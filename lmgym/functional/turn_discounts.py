"""Credit by turns: each answer of an episode is a step. Tensors in, tensors out.

`Batch.turn` [N T] numbers the turns of an episode. Actions of one number are one step, even if other tokens are between
them (a calculator's result in the middle of a line). Two turns are two steps, even without a token between them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.functional.advantages import episode_steps, scatter_steps, sums
from lmgym.functional.shapes import Mask, PerRow, PerToken, RowIds, TokenIds


def turn_lengths(actions: Mask, turn: TokenIds, episode: RowIds) -> PerToken:
    """Number of actions in each action's turn, zero elsewhere.

    Example: turns of two actions and of one:
        >>> turn_lengths(torch.tensor([[0, 1, 1, 0, 1]]).bool(), torch.tensor([[0, 0, 0, 0, 1]]), torch.zeros(1).long())
        tensor([[0., 2., 2., 0., 1.]])
    """
    inverse: Tensor = torch.unique(episode, return_inverse=True)[1]
    number = inverse[:, None] * (turn.max() + 1) + turn  # of each turn, different between episodes
    counts = sums(actions.to(torch.get_default_dtype()).flatten(), number.flatten())
    return counts[number] * actions


def longest_turns(actions: Mask, turn: TokenIds, episode: RowIds) -> PerRow:
    """Number of actions in the longest turn of each row's episode.

    Example: turns of two actions and of one, in a row each:
        >>> longest_turns(torch.tensor([[1, 1], [1, 0]]).bool(), torch.tensor([[0, 0], [1, 0]]), torch.zeros(2).long())
        tensor([2., 2.])
    """
    own = turn_lengths(actions, turn, episode).amax(1)
    numbers, inverse = torch.unique(episode, return_inverse=True)
    return own.new_zeros(len(numbers)).scatter_reduce(0, inverse, own, "amax")[inverse]


def turn_returns(rewards: PerToken, actions: Mask, turn: TokenIds, episode: RowIds, gamma: float) -> PerToken:
    """G_k = r_k + gamma * G_{k+1} over the turns of an episode, on each action of turn k; zero elsewhere.

    Stepwise returns (LLM_RL; Sutton & Barto 2018, eq. 3.9, with a turn as the step): only the step from one turn to
    the next discounts. A reward inside a turn counts for the actions up to its own. Rows of one episode are chained.

    Example: a turn of two actions that earns nothing, then one of one action that earns 1:
        >>> turn_returns(torch.tensor([[0., 0., 0., 1.]]), torch.tensor([[1, 1, 0, 1]]).bool(),
        ...              torch.tensor([[0, 0, 0, 1]]), torch.zeros(1).long(), 0.99)
        tensor([[0.9900, 0.9900, 0.0000, 1.0000]])
    """
    row, column, steps = episode_steps(actions, episode)
    discount = per_turn(turn[row, column], gamma, rewards.dtype)
    dense = torch.where(steps, rewards[row, column], 0.0)
    for t in reversed(range(steps.shape[1] - 1)):
        dense[:, t] += discount[:, t] * dense[:, t + 1]
    return scatter_steps(dense, row, column, steps, (actions.shape[0], actions.shape[1]))


def per_turn(turn: Int[Tensor, "E L"], factor: float, dtype: torch.dtype = torch.float32) -> Float[Tensor, "E L"]:
    """A discount per turn as a discount per action: `factor` at the last action of each turn, 1 inside a turn.

    The last column is `factor`: the discount of the state after the episode.

    Example: per_turn(torch.tensor([[0, 0, 1]]), 0.5) -> tensor([[1.0000, 0.5000, 0.5000]])"""
    ends = torch.ones_like(turn, dtype=torch.bool)
    ends[:, :-1] = turn[:, 1:] != turn[:, :-1]
    return torch.ones(turn.shape, dtype=dtype, device=turn.device).masked_fill(ends, factor)


def turn_means(returns: PerToken, actions: Mask, turn: TokenIds, episode: RowIds, group: RowIds) -> PerRow:
    """Mean return of the turns of each row's group. A turn counts once, with the return of its first action.

    If all returns of a group are equal, the mean is exactly that number, so that returns minus mean are zero.

    Example: a turn of two actions worth 1 and one of one action worth 0:
        >>> turn_means(torch.tensor([[1., 1.], [0., 0.]]), torch.tensor([[1, 1], [1, 0]]).bool(),
        ...            torch.zeros(2, 2).long(), torch.tensor([0, 1]), torch.zeros(2).long())
        tensor([0.5000, 0.5000])
    """
    row, column, steps = episode_steps(actions, episode)
    numbers = turn[row, column]
    begins = steps.clone()
    begins[:, 1:] &= numbers[:, 1:] != numbers[:, :-1]
    _, inverse = torch.unique(group, return_inverse=True)
    owner, values = inverse[row[begins]], returns[row[begins], column[begins]]
    least = values.new_zeros(int(inverse.max()) + 1).scatter_reduce(0, owner, values, "amin", include_self=False)
    above, counts = sums(values - least[owner], owner), sums(torch.ones_like(values), owner)
    return (least + above / counts)[inverse]
