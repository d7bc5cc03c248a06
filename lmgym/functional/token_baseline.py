"""A baseline for each token of a group's answers (the optimal token baseline, arXiv 2602.07078)."""

import torch

from lmgym.functional.advantages import episode_steps, first_rows, mixed_groups, scatter_steps
from lmgym.functional.shapes import Mask, PerRow, PerToken, RowIds


def squared_logit_gradient(logprobs: PerToken, squared_probabilities: PerToken) -> PerToken:
    """|d log pi(y) / d logits|^2 = 1 - 2 pi(y) + sum over the vocabulary of pi(v)^2 (arXiv 2602.07078).

    `logprobs` are those of the sampled tokens, in nats. Between 0, where the sampled token is certain, and 2.

    Example: of three tokens with probabilities .5, .25 and .25 the first one was sampled:
        >>> squared_logit_gradient(torch.tensor([[.5]]).log(), torch.tensor([[.5**2 + 2 * .25**2]]))
        tensor([[0.3750]])
    """
    return (1 - 2 * logprobs.exp() + squared_probabilities).clamp(min=0)  # rounding may fall below


def optimal_token_advantages(
    score: PerRow, squares: PerToken, actions: Mask, episode: RowIds, group: RowIds
) -> PerToken:
    """A_t = R - B_t, B_t = sum of W_t R / sum of W_t over the group's answers that have a t-th token.

    W_t = sum of `squares` over an answer's tokens up to t, its squared gradient so far (`squared_logit_gradient`). This
    baseline has the least variance, token by token (arXiv 2602.07078; verl's `optimal_token_baseline`). Tokens of an
    episode are counted through all of its rows. A token that no other answer of the group is long enough for, and
    groups of equal scores, get exactly zero; so do tokens that are no actions.

    Example: of two answers the second is surer of what it says, and counts less:
        >>> actions = torch.ones(2, 2).bool()
        >>> optimal_token_advantages(torch.tensor([1., 0.]), torch.tensor([[.6, .2], [.2, .2]]), actions,
        ...                          torch.arange(2), torch.zeros(2).long())
        tensor([[ 0.2500,  0.3333],
                [-0.7500, -0.6667]])
    """
    row, column, steps = episode_steps(actions, episode)
    weight = torch.where(steps, squares[row, column], 0.0).cumsum(1) * steps
    first = first_rows(episode)
    order = torch.argsort(episode[first])  # the order of the lines
    own, mixed = score[first][order], mixed_groups(score, group)[first][order]
    numbers, owner = torch.unique(group[first][order], return_inverse=True)
    # Above the least score of its group, so that neither a constant nor its rounding is in the weighted mean.
    least = own.new_zeros(len(numbers)).scatter_reduce(0, owner, own, "amin", include_self=False)
    above = own - least[owner]
    empty = weight.new_zeros(len(numbers), steps.shape[1])
    total = empty.index_add(0, owner, weight)
    earned = empty.index_add(0, owner, weight * above[:, None])
    baseline = earned / torch.where(total > 0, total, 1.0)
    answers = empty.index_add(0, owner, steps.to(weight.dtype))
    counts = steps & mixed[:, None] & (answers > 1)[owner]
    credits = torch.where(counts, above[:, None] - baseline[owner], 0.0)
    return scatter_steps(credits, row, column, steps, (actions.shape[0], actions.shape[1]))
