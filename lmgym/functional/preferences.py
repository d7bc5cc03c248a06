"""Losses of judged answers, to be minimised: one number a pair, or one an answer that is good or bad alone. The better
answer of a pair is the chosen one."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.functional.advantages import sums
from lmgym.functional.shapes import Mask, PerToken, RowIds

PairObjective = Literal["sigmoid", "hinge", "ipo"]


def best_and_worst(score: Float[Tensor, " E"], group: Int[Tensor, " E"]) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """A pair for each group whose scores differ: the numbers of its best and of its worst episode; of equals the first.

    Example:
        >>> best_and_worst(torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([4, 4, 7, 7]))
        (tensor([1]), tensor([0]))
    """
    pairs = []
    for number in torch.unique(group).tolist():
        own = (group == number).nonzero()[:, 0]
        best, worst = own[score[own].argmax()], own[score[own].argmin()]
        if score[best] > score[worst]:
            pairs.append((int(best), int(worst)))
    chosen, rejected = zip(*pairs, strict=True) if pairs else ((), ())
    return torch.tensor(chosen, dtype=torch.long), torch.tensor(rejected, dtype=torch.long)


def ordered(margin: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """1 for a pair whose margin is above 0, 0 for one below, and 1/2 for none at all, as before any training.

    Example: ordered(torch.tensor([0.3, 0.0, -0.1])) -> tensor([1.0000, 0.5000, 0.0000])"""
    return (margin > 0).to(margin.dtype) + 0.5 * (margin == 0)


def episode_totals(values: PerToken, actions: Mask, episode: RowIds, mean: bool = False) -> Float[Tensor, " E"]:
    """The sum of the values over each episode's actions, or their mean; episodes in ascending order of their number."""
    _, inverse = torch.unique(episode, return_inverse=True)
    totals = sums((values * actions).sum(1), inverse)
    return totals / sums(actions.sum(1).to(values.dtype), inverse).clamp(min=1.0) if mean else totals


def pair_loss(
    difference: Float[Tensor, " P"], objective: PairObjective, beta: float, margin: float = 0.0, smoothing: float = 0.0
) -> Float[Tensor, " P"]:
    """The loss of each pair, from the difference h of its log-ratios: chosen minus rejected, each the log-probability
    of an answer, minus the reference's if there is one.

    sigmoid: -log sigmoid(beta h - margin) (DPO, arXiv 2305.18290, eq. 7; with a margin SimPO, arXiv 2405.14734, eq. 6).
    With `smoothing` e, a label is wrong with that probability: (1 - e) of this loss and e of that of the exchanged pair
    (conservative DPO, Mitchell 2023). hinge: max(0, 1 - beta h) (SLiC, arXiv 2305.10425). ipo: (h - 1 / (2 beta))^2
    (arXiv 2310.12036, eq. 17, whose tau is beta).

    Example: pair_loss(torch.tensor([0.0]), "sigmoid", beta=0.1) -> tensor([0.6931])"""
    if objective == "hinge":
        return torch.relu(1 - beta * difference)
    if objective == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    logits = beta * difference - margin
    usual, exchanged = (-torch.nn.functional.logsigmoid(sign * logits) for sign in (1.0, -1.0))
    return (1 - smoothing) * usual + smoothing * exchanged


def odds_ratio_loss(chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """ORPO's loss of each pair (arXiv 2403.07691, eq. 7), from the mean log-probabilities per token: -log sigmoid of
    the difference of log(p / (1 - p)), where p is the geometric mean of an answer's probabilities.

    Example: odds_ratio_loss(torch.tensor([-0.5]), torch.tensor([-0.5])) -> tensor([0.6931])"""
    # An answer of probability 1 would have odds without end; -eps is the next smaller number.
    means = [mean.clamp(max=-torch.finfo(mean.dtype).eps) for mean in (chosen, rejected)]
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    return -torch.nn.functional.logsigmoid(odds[0] - odds[1])


def kto_loss(
    ratio: Float[Tensor, " E"],
    good: Bool[Tensor, " E"],
    baseline: Float[Tensor, ""],
    beta: float,
    good_weight: float = 1.0,
    bad_weight: float = 1.0,
) -> Float[Tensor, " E"]:
    """KTO's loss of each answer (arXiv 2402.01306, eq. 8), from its log-ratio, policy to reference: 1 - sigmoid(beta
    (ratio - baseline)) of a good one and 1 - sigmoid(beta (baseline - ratio)) of a bad one, times its weight. The
    `baseline` is the KL to the reference, a constant to the gradient.

    Example: kto_loss(torch.tensor([0.0]), torch.tensor([True]), torch.tensor(0.0), beta=0.1) -> tensor([0.5000])"""
    gain = torch.where(good, ratio - baseline, baseline - ratio)
    weight = torch.where(good, ratio.new_tensor(good_weight), ratio.new_tensor(bad_weight))  # in the ratio's precision
    return weight * (1 - torch.sigmoid(beta * gain))
