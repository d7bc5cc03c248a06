"""Credit assignment: from scores and rewards to advantages and returns. Tensors in, tensors out."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.functional.shapes import Mask, PerRow, PerToken, RowIds

Scale = Literal["none", "group", "batch"]


def group_means(score: PerRow, episode: RowIds, group: RowIds) -> PerRow:
    """Mean score of each row's group [N]. Every episode counts once, whatever its number of rows."""
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    return (sums(score * first, inverse) / sums(first.to(score.dtype), inverse))[inverse]


def group_centred(
    score: PerRow, episode: RowIds, group: RowIds, scale: Scale = "none", epsilon: float = 1e-4
) -> PerRow:
    """A = R - mean(R of the group) (Dr. GRPO, arXiv 2503.20783, section 3), optionally / (deviation + epsilon).

    scale="group": divided by the standard deviation of the group's scores (GRPO, arXiv 2402.03300, section 4.1.2);
    "batch": of all scores (arXiv 2508.08221). Deviations are unbiased, epsilon is TRL's. A group of one, or of equal
    scores, gets exactly zero.

    Example: group_centred(torch.tensor([1., 0.]), torch.arange(2), torch.zeros(2).long()) -> tensor([ 0.5000, -0.5000])
    """
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    centred = torch.where(mixed_groups(score, group), score - group_means(score, episode, group), 0.0)
    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (deviation(score[first]) + epsilon)
    counts = sums(first.to(score.dtype), inverse)
    variance = sums(centred**2 * first, inverse) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)[inverse]


def leave_one_out(score: PerRow, episode: RowIds, group: RowIds) -> PerRow:
    """A_i = R_i - mean of the other scores of its group (RLOO, arXiv 2402.14740, eq. 8). A group of one gets zero.

    Equals group_centred times n / (n - 1).

    Example: leave_one_out(torch.tensor([1., 0.]), torch.arange(2), torch.zeros(2).long()) -> tensor([ 1., -1.])"""
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    counts = sums(first.to(score.dtype), inverse)[inverse]
    return group_centred(score, episode, group) * counts / (counts - 1).clamp(min=1)


def deviation(values: Float[Tensor, " E"]) -> Float[Tensor, ""]:
    """The unbiased standard deviation; 0 for a single value or none."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def batch_mean(score: PerRow, episode: RowIds) -> Float[Tensor, ""]:
    """Mean score of the batch. Every episode counts once."""
    first = first_rows(episode)
    return (score * first).sum() / first.sum()


def discounted_returns(rewards: PerToken, actions: Mask, gamma: float) -> PerToken:
    """G_t = r_t + gamma * G_{t+1} over the actions of a row (Sutton & Barto 2018, eq. 3.9); zero elsewhere.

    A step is an action. Prompt and environment tokens between actions are skipped: they neither discount nor earn. To
    discount per turn, see functional/turn_discounts.py.

    Example:
        >>> discounted_returns(torch.tensor([[0., 0., 0., 1.]]), torch.ones(1, 4, dtype=torch.bool), 0.99)
        tensor([[0.9703, 0.9801, 0.9900, 1.0000]])
    """
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        current = rewards[:, t] + gamma * following
        following = torch.where(actions[:, t], current, following)
        returns[:, t] = torch.where(actions[:, t], current, 0.0)
    return returns


def gae(
    rewards: Float[Tensor, "E L"],
    values: Float[Tensor, "E L"],
    steps: Bool[Tensor, "E L"],
    last_values: Float[Tensor, " E"],
    gamma: float | Float[Tensor, "E L"],
    gae_lambda: float | Float[Tensor, "E L"],
) -> tuple[Float[Tensor, "E L"], Float[Tensor, "E L"]]:
    """Generalised advantage estimation: advantages and returns (arXiv 1506.02438, eq. 16), zero outside of the steps.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, return_t = A_t + V_t. A row is an
    episode; its steps start at column 0 without a gap, and later columns are not read. `last_values` are the values of
    the states after the last steps: 0 if the episode terminated, the critic's value if it was cut off. A gamma or
    lambda given per step applies between that step and the next (functional/turn_discounts.py: `per_turn`).

    Example:
        >>> gae(torch.tensor([[0., 1.]]), torch.tensor([[.5, .6]]), torch.ones(1, 2).bool(), torch.zeros(1), 0.99, 0.95)
        (tensor([[0.4702, 0.4000]]), tensor([[0.9702, 1.0000]]))
    """
    last = last_values[:, None]
    continues = torch.cat([steps[:, 1:], torch.zeros_like(steps[:, :1])], 1)
    following = torch.where(continues, torch.cat([values[:, 1:], last], 1), last)
    discount = gamma * torch.ones_like(rewards)
    decay = discount * gae_lambda
    deltas = torch.where(steps, rewards + discount * following - values, 0.0)
    advantages = torch.zeros_like(deltas)
    ahead = torch.zeros_like(last_values)
    for t in reversed(range(steps.shape[1])):
        ahead = deltas[:, t] + decay[:, t] * ahead
        advantages[:, t] = ahead
    return advantages, torch.where(steps, advantages + values, 0.0)


def episode_steps(actions: Mask, episode: RowIds) -> tuple[Int[Tensor, "E L"], Int[Tensor, "E L"], Bool[Tensor, "E L"]]:
    """Row and column of each episode's actions [E L], and a mask of the steps [E L] that exist.

    `values[row, column]` turns a column `values` [N T] into one line of actions per episode, as `gae` reads it. There
    are E episodes, in the order of their numbers, and L actions in the longest; all rows of an episode are chained, in
    the order of the rows. Entries without a step have row 0, column 0.

    Example: episode 7 has two rows, of two actions and one:
        >>> row, column, steps = episode_steps(torch.tensor([[0, 1, 1], [0, 0, 1]]).bool(), torch.tensor([7, 7]))
        >>> row, column
        (tensor([[0, 0, 1]]), tensor([[1, 2, 2]]))
    """
    numbers, inverse = torch.unique(episode, return_inverse=True)
    row, column = actions.nonzero(as_tuple=True)
    order = torch.argsort(inverse[row], stable=True)  # nonzero goes by rows, so an episode's rows stay in order
    row, column = row[order], column[order]
    owner = inverse[row]
    counts = torch.bincount(owner, minlength=len(numbers))
    step = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    steps = torch.arange(int(counts.max()), device=owner.device) < counts[:, None]
    empty = torch.zeros(steps.shape, dtype=row.dtype, device=row.device)
    return empty.index_put((owner, step), row), empty.index_put((owner, step), column), steps


def scatter_steps(
    dense: Float[Tensor, "E L"],
    row: Int[Tensor, "E L"],
    column: Int[Tensor, "E L"],
    steps: Bool[Tensor, "E L"],
    shape: tuple[int, int],
) -> PerToken:
    """The inverse of `episode_steps`: from one line per episode [E L] to a column [N T] of `shape`, zero elsewhere.

    Example:
        >>> actions = torch.tensor([[0, 1, 1], [0, 0, 1]]).bool()
        >>> row, column, steps = episode_steps(actions, torch.tensor([7, 7]))
        >>> scatter_steps(torch.tensor([[.1, .2, .3]]), row, column, steps, (2, 3))
        tensor([[0.0000, 0.1000, 0.2000],
                [0.0000, 0.0000, 0.3000]])
    """
    return dense.new_zeros(shape).index_put((row[steps], column[steps]), dense[steps])


def whiten(
    values: Float[Tensor, "*S"],
    mask: Bool[Tensor, "*S"],
    shift_mean: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    inside_root: bool = False,
) -> Float[Tensor, "*S"]:
    """(x - mean) / (standard deviation + epsilon) over the True entries of the mask, zero elsewhere.

    Unbiased (n - 1): advantages of a minibatch (stable-baselines3, RL4LMs). Biased: PPO's norm_reward (RL4LMs).
    `inside_root` divides by sqrt(variance + epsilon), as TRL does. Without `shift_mean` the mean is added again, so
    only the scale changes (TRL's whitened rewards). A single value becomes zero, and so do equal ones: their mean may
    differ from them by rounding, which the deviation, rounding itself, would blow up to 1.

    Example:
        >>> whiten(torch.tensor([0., 0., 1., -.1]), torch.ones(4, dtype=torch.bool), unbiased=False)
        tensor([-0.5008, -0.5008,  1.7249, -0.7233])
    """
    count = mask.sum()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    chosen = values[mask]
    equal = len(chosen) > 0 and bool(chosen.min() == chosen.max())
    centred = torch.zeros_like(values) if equal else torch.where(mask, values - mean, 0.0)
    variance = (centred**2).sum() / (count - int(unbiased)).clamp(min=1)
    scaled = centred / ((variance + epsilon).sqrt() if inside_root else variance.sqrt() + epsilon)
    return scaled if shift_mean else torch.where(mask, scaled + mean, 0.0)


def explained_variance(
    values: Float[Tensor, "*S"], returns: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]
) -> Float[Tensor, ""]:
    """1 - Var(returns - values) / Var(returns) over the True entries of the mask (stable-baselines3).

    1: the critic is exact up to a constant; 0: as good as a constant; below 0: worse. NaN if all returns are equal.

    Example: explained_variance(torch.tensor([0., 1.]), torch.tensor([0., 2.]), torch.ones(2).bool()) -> tensor(0.7500)
    """
    masked_returns, errors = returns[mask], (returns - values)[mask]
    if not len(masked_returns) or masked_returns.min() == masked_returns.max():
        return masked_returns.new_tensor(float("nan"))
    return 1 - errors.var(correction=0) / masked_returns.var(correction=0)


def first_rows(episode: RowIds) -> Bool[Tensor, " N"]:
    """True at the first row of each episode [N], for statistics that count an episode once."""
    unique, inverse = torch.unique(episode, return_inverse=True)
    rows = torch.arange(len(episode), device=episode.device)
    first = torch.full((len(unique),), len(episode), device=episode.device).scatter_reduce(0, inverse, rows, "amin")
    return first[inverse] == rows


def sums(values: PerRow, inverse: RowIds) -> Float[Tensor, " G"]:
    """The sum of the values of each number in `inverse` [G].

    Example: sums(torch.tensor([1., 2., 4.]), torch.tensor([0, 1, 0])) -> tensor([5., 2.])"""
    return torch.zeros(int(inverse.max()) + 1, dtype=values.dtype, device=values.device).index_add(0, inverse, values)


def mixed_groups(score: PerRow, group: RowIds) -> Bool[Tensor, " N"]:
    """True for rows of groups whose scores differ. The mean of equal scores may differ from them by rounding, which
    must give no credit. Example: mixed_groups(tensor([0., 1., 1.]), tensor([0, 0, 1]))"""
    _, inverse = torch.unique(group, return_inverse=True)
    empty = score.new_zeros(int(inverse.max()) + 1)
    least, most = (empty.scatter_reduce(0, inverse, score, how, include_self=False) for how in ("amin", "amax"))
    return (least != most)[inverse]


def placed_on_last(score: PerRow, actions: Mask, episode: RowIds) -> PerToken:
    """The number of each row's episode, written to the last action of the episode; zero elsewhere.

    Example: one episode of two rows:
        >>> actions = torch.tensor([[1, 1], [1, 0]]).bool()
        >>> placed_on_last(torch.tensor([.5, .5]), actions, torch.tensor([3, 3]))
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """
    row, column, steps = episode_steps(actions, episode)
    last = steps.sum(1, keepdim=True) - 1
    index = (row.gather(1, last)[:, 0], column.gather(1, last)[:, 0])
    return score.new_zeros(actions.shape).index_put(index, score[index[0]])
