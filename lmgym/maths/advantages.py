"""Credit: from scores and rewards to advantages. Tensors in, tensors out."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def group_means(
    score: Float[Tensor, " N"], episode: Int[Tensor, " N"], group: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Mean score of each row's group, every episode counted once."""
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    return (_sums(score * first, inverse) / _sums(first.to(score.dtype), inverse))[inverse]


def group_centred(
    score: Float[Tensor, " N"],
    episode: Int[Tensor, " N"],
    group: Int[Tensor, " N"],
    scale: bool = False,
    epsilon: float = 1e-4,
) -> Float[Tensor, " N"]:
    """A = R - mean(R of the group), or that over (the group's standard deviation + epsilon).

    Centred: Dr. GRPO, arXiv 2503.20783, section 3. Scaled: GRPO, arXiv 2402.03300, section 4.1.2, with the unbiased
    standard deviation and TRL's epsilon. A group of one gets zero.

    Example:
        >>> group_centred(torch.tensor([1., .5, 0., .5]), torch.arange(4), torch.zeros(4, dtype=torch.long))
        tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    centred = score - group_means(score, episode, group)
    if not scale:
        return centred
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    counts = _sums(first.to(score.dtype), inverse)
    variance = _sums(centred**2 * first, inverse) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)[inverse]


def leave_one_out(
    score: Float[Tensor, " N"], episode: Int[Tensor, " N"], group: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """A_i = R_i - mean of the other scores of its group (RLOO, arXiv 2402.14740, eq. 8). A group of one gets zero.

    Equals group_centred times n / (n - 1).

    Example:
        >>> leave_one_out(torch.tensor([1., .5, 0., .5]), torch.arange(4), torch.zeros(4, dtype=torch.long))
        tensor([ 0.6667,  0.0000, -0.6667,  0.0000])
    """
    first = first_rows(episode)
    _, inverse = torch.unique(group, return_inverse=True)
    counts = _sums(first.to(score.dtype), inverse)[inverse]
    return (score - group_means(score, episode, group)) * counts / (counts - 1).clamp(min=1)


def batch_mean(score: Float[Tensor, " N"], episode: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """Mean score of the batch, every episode counted once."""
    first = first_rows(episode)
    return (score * first).sum() / first.sum()


def discounted_returns(
    rewards: Float[Tensor, "N T"], actions: Bool[Tensor, "N T"], gamma: float
) -> Float[Tensor, "N T"]:
    """G_t = r_t + gamma * G_{t+1} over the actions of a row (Sutton & Barto 2018, eq. 3.9); zero elsewhere.

    One step is one action; the prompt and environment tokens between actions neither discount nor earn. To discount
    over turns or lines (LLM_RL), give one column per step.

    Example:
        >>> discounted_returns(torch.tensor([[0., 0., 0., 1.]]), torch.ones(1, 4, dtype=torch.bool), 0.99)
        tensor([[0.9703, 0.9801, 0.9900, 1.0000]])
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        here = rewards[:, t] + gamma * following
        following = torch.where(actions[:, t], here, following)
        returns[:, t] = torch.where(actions[:, t], here, torch.zeros_like(here))
    return returns


def first_rows(episode: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """True at the first row of each episode, so that statistics count an episode once."""
    unique, inverse = torch.unique(episode, return_inverse=True)
    rows = torch.arange(len(episode), device=episode.device)
    first = torch.full((len(unique),), len(episode), device=episode.device).scatter_reduce(0, inverse, rows, "amin")
    return first[inverse] == rows


def _sums(values: Float[Tensor, " N"], inverse: Int[Tensor, " N"]) -> Float[Tensor, " G"]:
    return torch.zeros(int(inverse.max()) + 1, dtype=values.dtype, device=values.device).index_add(0, inverse, values)
