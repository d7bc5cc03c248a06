"""How much of the rise of a reward comes with something that can be counted in the answers.

Within a group all answers are to one prompt, by one policy. There the slope b of the reward over a feature x is found,
by least squares. Between the first and the last third of the steps the mean of x has moved too; b times that is the
part of the rise that comes with x (the "explained" part of Kitagawa 1955, Oaxaca 1973 and Blinder 1973, with the slope
within groups). It is what the rise would be if x alone had changed, and no proof that x is what is paid for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmgym.core import seeds
from lmgym.stats.intervals import Interval

DRAWS = 1000  # of the steps with replacement, for the intervals
BOUNDS = (2.5, 97.5)  # per cent: a 95% interval
TOGETHER = "all of them"

Array = np.ndarray


@dataclass(frozen=True)
class Answers:
    """Answers of a run, one number each: its `step`, its `group` (no two steps share one), what it earned, and its
    features. Example: Answers([0, 0, 9, 9], [0, 0, 1, 1], [0.0, 1.0, 1.0, 1.0], {"words": [3, 9, 12, 12]})"""

    step: Sequence[int]
    group: Sequence[int]
    value: Sequence[float]
    features: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Part:
    """A feature's mean in the first and in the last third of the steps, its correlation with the reward within groups,
    and the `part` of the rise that comes with it. The intervals draw steps anew. Example: part.part.mean -> 0.31"""

    first: float
    last: float
    correlation: Interval
    part: Interval


@dataclass(frozen=True)
class Rise:
    """The rise of a reward from the first third of the steps to the last, and the parts of it that come with each
    feature, and with all of them TOGETHER. Example: explain_rise(answers).parts["words"].part.mean -> 0.31"""

    answers: int
    steps: int
    rise: Interval
    parts: dict[str, Part]


def explain_rise(answers: Answers) -> Rise | None:
    """The parts of a reward's rise; None with fewer than six steps, where no group has answers that differ, and for
    numbers whose squares are too large."""
    steps = sorted(set(answers.step))
    if len(steps) < 6:
        return None
    x, y = np.array([answers.features[name] for name in answers.features]).T, np.array(answers.value)  # [A F], [A]
    place = {step: number for number, step in enumerate(steps)}
    own = np.array([place[step] for step in answers.step])
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _sums(x, y, own, np.array(answers.group), len(steps))
    if not sums.squares.any() or not np.isfinite(sums.squares).all():
        return None
    # 1. The numbers themselves, then those of steps drawn with replacement, each third by itself.
    third = len(steps) // 3
    parts = np.arange(third), np.arange(third, len(steps) - third), np.arange(len(steps) - third, len(steps))
    generator = seeds.generator("rise", len(steps))
    found = [_one(sums, np.ones(len(steps)), third)]
    for _ in range(DRAWS):
        drawn = np.concatenate([generator.choice(part, len(part)) for part in parts])
        found.append(_one(sums, np.bincount(drawn, minlength=len(steps)).astype(float), third))
    # 2. As intervals: the rise, then correlation and part of each feature, and the part of all.
    rows = np.array(found)
    intervals = list[Interval]()
    for own in rows.T:
        drawn = own[1:][np.isfinite(own[1:])]
        low, high = np.percentile(drawn, BOUNDS).tolist() if len(drawn) else (np.nan, np.nan)
        intervals.append(Interval(float(own[0]), low, high, len(steps)))
    count = len(answers.features)
    first, last = (sums.means[part].mean(0) for part in (parts[0], parts[2]))
    named = {
        name: Part(float(first[n]), float(last[n]), intervals[1 + n], intervals[1 + count + n])
        for n, name in enumerate(answers.features)
    }
    whole = Part(np.nan, np.nan, Interval(np.nan, np.nan, np.nan, 0), intervals[-1])
    return Rise(len(y), len(steps), intervals[0], named | {TOGETHER: whole})


@dataclass(frozen=True)
class _Sums:
    """Of each step: means of features [S F] and of the reward [S], and within its groups the sums of products of
    features [S F F], of features and reward [S F], and of the reward's squares [S]."""

    means: Array
    reward: Array
    products: Array
    with_reward: Array
    squares: Array


def _sums(x: Array, y: Array, step: Array, group: Array, steps: int) -> _Sums:
    _, inside = np.unique(group, return_inverse=True)
    sizes = np.bincount(inside)

    def within(values: Array) -> Array:
        return values - (np.bincount(inside, values) / sizes)[inside]

    centred, reward = np.stack([within(column) for column in x.T], 1), within(y)
    each = [step == number for number in range(steps)]
    return _Sums(
        np.stack([x[own].mean(0) for own in each]), np.array([y[own].mean() for own in each]),
        np.stack([centred[own].T @ centred[own] for own in each]),
        np.stack([centred[own].T @ reward[own] for own in each]), np.array([reward[own] @ reward[own] for own in each]),
    )  # fmt: skip


def _one(sums: _Sums, weights: Array, third: int) -> list[float]:
    """The rise, the correlations [F], the parts [F] and the part of all, with each step counted so many times."""
    change, rise = (
        np.average(own[-third:], 0, weights[-third:]) - np.average(own[:third], 0, weights[:third])
        for own in (sums.means, sums.reward)
    )
    products, with_reward = (np.tensordot(weights, own, 1) for own in (sums.products, sums.with_reward))
    sizes, square = np.diag(products), float(weights @ sums.squares)
    safe = np.where(sizes > 0, sizes, np.inf)  # a feature that never differs within a group explains nothing
    slopes = with_reward / safe
    correlations = with_reward / np.sqrt(safe * square) if square > 0 else np.full(len(sizes), np.nan)
    scale = np.sqrt(np.where(sizes > 0, sizes, 1.0))
    joint = np.linalg.lstsq(products / np.outer(scale, scale), with_reward / scale, rcond=1e-8)[0] / scale
    return [float(rise), *correlations.tolist(), *(slopes * change).tolist(), float(joint @ change)]
