"""Credit from the scores of a group, besides the mean as baseline (functional/advantages.py). One number for each row;
every episode counts once, whatever its number of rows."""

from math import comb

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lmgym.functional.advantages import deviation, first_rows, group_centred, group_means, mixed_groups, sums
from lmgym.functional.shapes import PerRow, RowIds


def mean_scaled(score: PerRow, episode: RowIds, group: RowIds) -> PerRow:
    """A = (R - mean) / mean, mean of the group (MaxRL, arXiv 2602.02710).

    With scores of 0 and 1 its policy gradient is the one of log(share of right answers), cut to as many terms as there
    are answers. A group that earned nothing gets zero. Raises ValueError for a score below 0.

    Example: mean_scaled(torch.tensor([1., 0., 0., 0.]), torch.arange(4), torch.zeros(4).long())
    -> tensor([ 3., -1., -1., -1.])"""
    if bool((score < 0).any()):
        raise ValueError(f"a score of {float(score.min()):.4g}, and only scores of 0 or more can be divided by a mean")
    mixed, means = mixed_groups(score, group), group_means(score, episode, group)
    return torch.where(mixed, (score - means) / torch.where(mixed, means, 1.0), 0.0)


def length_weighted(score: PerRow, lengths: PerRow, episode: RowIds, group: RowIds) -> PerRow:
    """A = R - sum(length R) / sum(length), over the group (OPO, arXiv 2505.23585).

    The baseline of least variance, if the squared gradient of an answer grows with its length (in tokens). A group of
    one, or of equal scores, gets exactly zero.

    Example: length_weighted(torch.tensor([1., 0.]), torch.tensor([1., 3.]), torch.arange(2), torch.zeros(2).long())
    -> tensor([ 0.7500, -0.2500])"""
    first = first_rows(episode).to(score.dtype)
    _, inverse = torch.unique(group, return_inverse=True)
    weight = lengths.to(score.dtype) * first
    means = (sums(weight * score, inverse) / sums(weight, inverse).clamp(min=1))[inverse]
    return torch.where(mixed_groups(score, group), score - means, 0.0)


def deviation_of_others(score: PerRow, episode: RowIds, group: RowIds) -> PerRow:
    """The standard deviation (unbiased) of the other scores of each answer's group, + 1e-6; 1 where these are equal, or
    fewer than two (NeMo-RL's `normalize_rewards` beside `use_leave_one_out_baseline`).

    Example: deviation_of_others(torch.tensor([3., 0., 2.]), torch.arange(3), torch.zeros(3).long())
    -> tensor([1.4142, 0.7071, 2.1213])"""
    first = first_rows(episode)
    values = torch.ones_like(score[first])
    for one in torch.unique(group):
        own = (group[first] == one).nonzero()[:, 0]
        size, scores = len(own), score[first][own].double()
        if size > 2:
            apart = ~torch.eye(size, dtype=torch.bool, device=score.device)
            others = scores.expand(size, size)[apart].view(size, size - 1)
            differ = others.amax(1) != others.amin(1)  # of equal scores a rounding error may be left
            values[own] = torch.where(differ, others.std(1) + 1e-6, 1.0).to(score.dtype)
    return _of_rows(values, episode, first)


def pass_at_k(score: PerRow, episode: RowIds, group: RowIds, k: int) -> PerRow:
    """A_i = n / C(n, k) * sum over the sets I of k answers with i in it of [max of I - max of I without i].

    n answers a group. What an answer adds to the best of k: its policy gradient is, without bias, that of the expected
    best of k answers, pass@k where scores are 0 and 1 (PKPO, arXiv 2505.15201, s^(loo-1); times n, since a loss here is
    a mean over answers). k = n leaves the best alone, with its lead over the second. Groups smaller than k get zero.
    Raises ValueError for k below 2.

    Example: pass_at_k(torch.tensor([1., 1., 0., 0.]), torch.arange(4), torch.zeros(4).long(), 2)
    -> tensor([1.3333, 1.3333, 0.0000, 0.0000])"""
    if k < 2:
        raise ValueError(f"k is {k}; the best of 1 answer is the answer, so k must be at least 2")
    first = first_rows(episode)
    values = torch.zeros_like(score[first])
    for number in torch.unique(group):
        members = (group[first] == number).nonzero()[:, 0]
        size = len(members)
        ordered, order = score[first][members].sort()
        # Of the sets of k - 1 others, in how many each is the largest; C(n, k) sets in all.
        ways = ordered.new_tensor([comb(place, k - 2) / comb(size, k) if size >= k else 0.0 for place in range(size)])
        lead = (ordered[:, None] - ordered[None, :]).clamp(min=0)  # 0 towards larger ones and equals
        values[members[order]] = size * (lead * ways).sum(1)
    return _of_rows(values, episode, first)


def gdpo_advantages(
    components: Float[Tensor, "N P"],
    weights: Float[Tensor, " P"],
    episode: RowIds,
    group: RowIds,
    epsilon: float = 1e-4,
) -> PerRow:
    """S / (deviation of S in the batch + epsilon), where S = sum_k w_k (r_k - mean r_k) / (deviation r_k + epsilon).

    Mean and deviation of a component are those of the group (GDPO, arXiv 2601.05242, section 3): so its influence
    depends on its weight and not on its scale, and answers with the same sum but different components keep different
    advantages. Each group's S sums to zero, so the paper's shift by the batch's mean is left out. A group of equal
    answers gets exactly zero. Deviations are unbiased; epsilon is TRL's. A component that is NaN, not judged, adds
    nothing to an answer's S, and is in no mean (TRL 1.16).

    Example: two answers; the first is right, the second is brief, and being right has twice the weight:
        >>> gdpo_advantages(torch.eye(2), torch.tensor([2., 1.]), torch.arange(2), torch.zeros(2, dtype=torch.long))
        tensor([ 0.7070, -0.7070])
    """
    normalised = [torch.zeros_like(component) for component in components.unbind(1)]
    for centred, component in zip(normalised, components.unbind(1), strict=True):
        known = ~component.isnan()
        if bool(known.any()):
            centred[known] = group_centred(component[known], episode[known], group[known], "group", epsilon)
    total = (torch.stack(normalised, 1) * weights).sum(1)
    return total / (deviation(total[first_rows(episode)]) + epsilon)


def ranks_in_group(values: PerRow, episode: RowIds, group: RowIds) -> RowIds:
    """How many episodes of its group come before each row's own, by ascending value, equals by number of the episode.

    Example: ranks_in_group(torch.tensor([9., 4., 4.]), torch.arange(3), torch.zeros(3).long()) -> tensor([2, 0, 1])"""
    first = first_rows(episode)
    numbers, own, of = episode[first], values[first], group[first]
    order = torch.argsort(numbers)
    order = order[torch.argsort(own[order], stable=True)]
    order = order[torch.argsort(of[order], stable=True)]
    place = torch.arange(len(order), device=order.device)
    begins = torch.searchsorted(of[order].contiguous(), of[order].contiguous())
    rank = torch.empty_like(place).index_put((order,), place - begins)
    return _of_rows(rank, episode, first)


def mixed_scale(score: PerRow, episode: RowIds, group: RowIds) -> float:
    """Answers / answers in groups whose scores differ (GPG's alpha, arXiv 2504.02546); 1 if there are none.

    So a step is not smaller for the groups from which nothing can be learned.

    Example: mixed_scale(torch.tensor([0., 1., 1., 1.]), torch.arange(4), torch.tensor([0, 0, 1, 1])) -> 2.0"""
    first = first_rows(episode)
    mixed = int((mixed_groups(score, group) & first).sum())
    return int(first.sum()) / mixed if mixed else 1.0


def overlong_penalty(lengths: PerRow, limit: int, share: float) -> PerRow:
    """0 up to (1 - share) of the limit, then falling linearly to -1 at the limit, and -1 beyond (soft overlong
    punishment; DAPO, arXiv 2503.14476, eq. 13). `lengths` are in tokens.

    Example: overlong_penalty(torch.tensor([80., 90., 100.]), 100, 0.2) -> tensor([ 0.0000, -0.5000, -1.0000])"""
    buffer = share * limit
    return -((lengths - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def _of_rows(values: Tensor, episode: RowIds, first: Bool[Tensor, " N"]) -> Tensor:
    """A number for each first row of an episode [E], written to all rows of that episode [N]."""
    order = torch.argsort(episode[first])
    return values[order[torch.searchsorted(episode[first][order], episode)]]
