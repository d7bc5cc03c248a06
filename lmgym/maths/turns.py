"""Credit by turns: an episode's answers are its steps, as a step of reasoning is in LLM_RL. Tensors in, tensors out.

A turn is a run of actions without a gap in its row; a batch does not mark where one ends, so two turns with no token
between them count as one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.maths.advantages import episode_steps, scatter_steps, sums


def turn_lengths(actions: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Number of actions in each action's turn, zero elsewhere. A turn is a run of actions without a gap in its row.

    Example: turns of two actions and of one:
        >>> turn_lengths(torch.tensor([[0, 1, 1, 0, 1]]).bool())
        tensor([[0., 2., 2., 0., 1.]])
    """
    number = _begins(actions).cumsum(1) * actions  # from 1; 0 collects what is no action
    counts = torch.zeros(actions.shape[0], actions.shape[1] + 1, device=actions.device)
    return counts.scatter_add(1, number, actions.float()).gather(1, number) * actions


def turn_returns(
    rewards: Float[Tensor, "N T"], actions: Bool[Tensor, "N T"], episode: Int[Tensor, " N"], gamma: float
) -> Float[Tensor, "N T"]:
    """G_k = r_k + gamma * G_{k+1} over the turns of an episode, on each action of turn k; zero elsewhere.

    LLM_RL's stepwise returns (Sutton & Barto 2018, eq. 3.9, with a turn as the step): only the step from one turn to
    the next discounts. A reward inside a turn reaches the actions up to its own. Rows of one episode are chained.

    Example: a turn of two actions that earns nothing, then one of one action that earns 1:
        >>> turn_returns(torch.tensor([[0., 0., 0., 1.]]), torch.tensor([[1, 1, 0, 1]]).bool(), torch.zeros(1).long(),
        ...              0.99)
        tensor([[0.9900, 0.9900, 0.0000, 1.0000]])
    """
    row, column, steps = episode_steps(actions, episode)
    goes_on = (row[:, 1:] == row[:, :-1]) & (column[:, 1:] == column[:, :-1] + 1)
    discount = torch.where(goes_on, rewards.new_ones(()), rewards.new_tensor(gamma))
    dense = torch.where(steps, rewards[row, column], 0.0)
    for t in reversed(range(steps.shape[1] - 1)):
        dense[:, t] += discount[:, t] * dense[:, t + 1]
    return scatter_steps(dense, row, column, steps, (actions.shape[0], actions.shape[1]))


def turn_means(
    returns: Float[Tensor, "N T"], actions: Bool[Tensor, "N T"], group: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Mean return of the turns of each row's group. A turn counts once, by the return of its first action.

    Exact where all are equal, so that returns less their mean are then zero.

    Example: a turn of two actions worth 1 and one of one action worth 0:
        >>> turn_means(torch.tensor([[1., 1.], [0., 0.]]), torch.tensor([[1, 1], [1, 0]]).bool(), torch.zeros(2).long())
        tensor([0.5000, 0.5000])
    """
    begins = _begins(actions)
    _, inverse = torch.unique(group, return_inverse=True)
    places = inverse[:, None].expand_as(begins)[begins]
    values = returns[begins]
    least = values.new_zeros(int(inverse.max()) + 1).scatter_reduce(0, places, values, "amin", include_self=False)
    above, counts = (sums(one, places) for one in (values - least[places], torch.ones_like(values)))
    return (least + above / counts)[inverse]


def _begins(actions: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
    """True at the first action of each turn."""
    return actions & ~torch.nn.functional.pad(actions, (1, 0))[:, :-1]
