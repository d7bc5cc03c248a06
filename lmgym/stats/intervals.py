"""Means with confidence intervals, and pass@k. Numpy only, so that evaluation and logs need no torch.

The independent unit is always the prompt: eight samples of one prompt contain less information than one sample of each
of eight prompts. So the samples of a prompt count through their mean. How often each interval covers the truth was
simulated (docs/intervals.md, benchmarks/intervals.py). Where nothing is known of the spread there is no interval: its
bounds are NaN, and tables say so."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lmgym.core.errors import LmgymError

ROUNDING = 1e-12  # relative: means of equal values differ by less than this


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; `count` is the number of independent units (prompts).

    `low` and `high` are NaN if there is no interval, as for a single prompt.

    Example: str(Interval(mean=0.412, low=0.370, high=0.455, count=512)) -> '0.412 [0.370, 0.455]'"""

    mean: float
    low: float
    high: float
    count: int
    share: bool = False
    """Whether the values lie between 0 and 1 by their definition, and so does the truth."""

    @property
    def has_bounds(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))

    def __str__(self) -> str:
        if not self.has_bounds:
            return f"{self.mean:.3f} [no interval]"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class SufficientStatistics:
    """A metric of a whole corpus that is a function of sums, not a mean of values: BLEU, of counts of n-grams.

    `rows` [N K] are the summands of each text (or prompt); `value` computes metrics [R] from sums [R K].

    Example: right words and all words of three texts; the metric is the share of all words that are right
        >>> SufficientStatistics(np.array([[1, 2], [3, 3], [0, 5]]), lambda sums: sums[:, 0] / sums[:, 1]).figure
        0.4
    """

    rows: npt.NDArray[Any]
    value: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

    @property
    def figure(self) -> float:
        return float(self.value(self.rows.sum(0, keepdims=True))[0])


def mean_interval(
    values_per_prompt: Sequence[Sequence[float]], confidence: float = 0.95, shares: bool = False
) -> Interval:
    """The mean over prompts, each with the same weight, and its interval, from the values of each prompt's samples.

    Values that are all 0 or 1, and with `shares` any values between 0 and 1 by their definition, get
    `share_interval`; all others Student's t of the prompts' means. Raises LmgymError if there are no prompts, or a
    prompt without samples.

    Example:
        >>> str(mean_interval([[1.0], [0.0], [1.0], [1.0]])), str(mean_interval([[3.0, 5.0], [2.0, 2.0]]))
        ('0.750 [0.125, 1.000]', '3.000 [-9.706, 15.706]')
    """
    if not len(values_per_prompt):
        raise LmgymError("there are no prompts to average over; the evaluation set is empty")
    for number, samples in enumerate(values_per_prompt):
        if not len(samples):
            raise LmgymError(f"prompt {number} has no samples; each prompt needs at least one value")
    means = [_mean(samples) for samples in values_per_prompt]
    shares = shares or all(value in (0, 1) for samples in values_per_prompt for value in samples)
    return share_interval(means, confidence) if shares else student_t(means, confidence)


def share_interval(shares: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of numbers between 0 and 1, one per prompt, and Student's t interval of these and of two more prompts,
    one of 0 and one of 1, within [0, 1].

    Adding as many successes as failures is from A. Agresti and B. Coull, The American Statistician 52 (1998), 119-126,
    and t from W. Pan, Computational Statistics & Data Analysis 40 (2002), 143-157. Here whole prompts are added, since
    samples of one prompt may depend on each other. It has a width even if all shares are equal. A single prompt gives
    no interval (NaN). Raises LmgymError without shares.

    Example: none of 25 is right; (1 + t) / 27 with t = 2.056 at 26 degrees of freedom
        >>> str(share_interval([0.0] * 25))
        '0.000 [0.000, 0.113]'
    """
    count, added = len(shares), student_t([*shares, 0.0, 1.0], confidence)
    if not count:
        raise LmgymError("there are no prompts to average over; the evaluation set is empty")
    mean = _mean(shares)
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1, share=True)
    return Interval(mean, max(0.0, added.low), min(1.0, added.high), count, share=True)


def student_t(values: Sequence[float], confidence: float = 0.95, share: bool = False) -> Interval:
    """Mean of independent values (of prompts, or of runs with different seeds), mean -+ t sd / sqrt(n), t with n - 1
    degrees of freedom.

    Student, Biometrika 6 (1908), 1-25; sd divides by n - 1. With few values the quantile is large: 12.7 for two, 4.3
    for three, 2.8 for five. A single value gives no interval (NaN), nor do equal ones: that nothing has differed so far
    says nothing about how much the next value will. The interval of a `share`, whose truth lies between 0 and 1, is cut
    to [0, 1]: that leaves out no value that can be true, so it covers the truth exactly as often as the whole one.
    Raises LmgymError without values.

    Example:
        >>> str(student_t([0.60, 0.64, 0.62])), str(student_t([0.6, 0.6]))
        ('0.620 [0.570, 0.670]', '0.600 [no interval]')
    """
    check_confidence(confidence)
    if not len(values):
        raise LmgymError("there are no values to average over; a table over seeds needs at least one finished run")
    count, mean = len(values), _mean(values)
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(max(count - 1, 1))
    found = _bounded(mean, deviation / math.sqrt(count), max(map(abs, values)), count, confidence)
    if not (share and found.has_bounds):
        return replace(found, share=share)
    return Interval(mean, max(0.0, found.low), min(1.0, found.high), count, share=True)


def sums_interval(summed: SufficientStatistics, confidence: float = 0.95) -> Interval:
    """A corpus metric, with a row for each prompt, and Student's t interval of its jackknife over prompts.

    The jackknife's standard error is sqrt((n - 1) / n * sum over prompts of (m_i - mean of m)^2), m_i the metric
    without prompt i (Tukey 1958; Efron & Tibshirani 1993, chapter 11). There is no interval (NaN) for a single prompt,
    if the metric is undefined without one of the prompts, and if it is the same without any of them.

    Example: sums_interval(bleu.corpus.sums(texts, examples)) -> Interval(mean=0.31, low=0.28, high=0.34, count=500)"""
    return jackknife_interval(summed.figure, jackknifed(summed), confidence)


def jackknifed(summed: SufficientStatistics) -> npt.NDArray[Any]:
    """The metric without each of the prompts [N]; NaN for a single prompt."""
    if len(summed.rows) < 2:
        return np.full(len(summed.rows), math.nan)
    return summed.value(summed.rows.sum(0, keepdims=True) - summed.rows)


def jackknife_interval(figure: float, without: npt.NDArray[Any], confidence: float = 0.95) -> Interval:
    """The interval of a figure, from what it is `without` each of the prompts [N] (see `sums_interval`)."""
    check_confidence(confidence)
    count = len(without)
    error = math.sqrt(max(count - 1, 1) / count * float(((without - without.mean()) ** 2).sum()))
    return _bounded(figure, error, float(abs(without).max()), count, confidence)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate, from samples >= k, of the probability that at least one of k samples is correct.

    1 - C(samples - correct, k) / C(samples, k): Chen et al., arXiv 2107.03374, equation 1, in exact integers.
    Raises LmgymError unless 1 <= k <= samples and 0 <= correct <= samples.

    Example: 1 of 4 samples is right, so it is in half of the 6 pairs: pass_at_k(correct=1, samples=4, k=2) -> 0.5"""
    if not 1 <= k <= samples:
        raise LmgymError(f"pass@{k} needs 1 <= k <= samples per prompt; there are {samples} samples")
    if not 0 <= correct <= samples:
        raise LmgymError(f"pass@{k}: {correct} correct of {samples} samples is impossible")
    draws = math.comb(samples, k)
    return (draws - math.comb(samples - correct, k)) / draws


def pass_at_k_each(values_per_prompt: Sequence[Sequence[float]], k: int, threshold: float = 1.0) -> list[list[float]]:
    """The pass@k of each prompt, in the form that `mean_interval` takes. A sample of at least `threshold` is correct.
    Raises LmgymError if a prompt has fewer than k samples.

    Example: str(mean_interval(pass_at_k_each([[0, 1], [1, 1], [0, 0]], k=2), shares=True)) -> '0.667 [0.000, 1.000]'"""
    for number, samples in enumerate(values_per_prompt):
        if len(samples) < k:
            raise LmgymError(f"pass@{k} needs {k} or more samples per prompt; prompt {number} has {len(samples)}")
    correct = [sum(value >= threshold for value in samples) for samples in values_per_prompt]
    sizes = [len(samples) for samples in values_per_prompt]
    return [[pass_at_k(right, size, k)] for right, size in zip(correct, sizes, strict=True)]


def do_not_overlap(a: Interval, b: Interval) -> bool:
    """True if one interval ends before the other begins; False if either has no bounds.

    Example: do_not_overlap(mean_interval([[0], [1]] * 300), mean_interval([[1], [1], [0]] * 200)) -> True"""
    return a.high < b.low or b.high < a.low


def change(before: Interval, after: Interval, better: int = 0) -> str:
    """What two intervals that do not overlap say, in a word: "gain" or "loss" where it is known that higher is better
    (`better` 1) or lower is (-1), else "higher" or "lower". "unclear" if they overlap, "-" if one has no bounds.

    Example: change(Interval(0.2, 0.1, 0.3, 50), Interval(0.6, 0.5, 0.7, 50), better=1) -> 'gain'"""
    if not (before.has_bounds and after.has_bounds):
        return "-"
    if not do_not_overlap(before, after):
        return "unclear"
    return direction(after.mean - before.mean, better)


def direction(difference: float, better: int = 0) -> str:
    """A difference in a word: "gain" or "loss" where `better` (1: higher, -1: lower) is known, else "higher" or
    "lower"."""
    if better:
        return "gain" if difference * better > 0 else "loss"
    return "higher" if difference > 0 else "lower"


def _bounded(mean: float, error: float, size: float, count: int, confidence: float) -> Interval:
    """mean -+ t error, t with count - 1 degrees of freedom; without bounds (NaN) for a single unit, or if the standard
    error is no more than rounding of numbers of this size, or not finite."""
    if count == 1 or not ROUNDING * size < error < math.inf:
        return Interval(mean, math.nan, math.nan, count)
    half = _t_quantile((1 + confidence) / 2, count - 1) * error
    return Interval(mean, mean - half, mean + half, count)


def t_probability(t: float, freedom: int) -> float:
    """The probability that a value of Student's t distribution with `freedom` degrees lies between -t and t.

    Abramowitz & Stegun 26.7.3 and 26.7.4, sums of freedom / 2 terms.

    Example: t_probability(12.706, freedom=1) -> 0.95"""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + sine * (total if freedom > 1 else 0.0))
    return sine * total


@cache
def _t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution with `freedom` degrees of freedom at a probability above 1/2.

    By bisection of `t_probability`."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < 2 * probability - 1 else (low, middle)
    return high


def _mean(values: Sequence[float]) -> float:
    """The mean, rounded once: the order of the values does not matter."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # a metric may return 1e308
        return math.fsum(value / len(values) for value in values)


def check_confidence(confidence: float) -> None:
    """Raise LmgymError for a confidence that is no probability between 0 and 1."""
    if not 0 < confidence < 1:
        raise LmgymError(f"confidence is {confidence}; it must lie between 0 and 1, as 0.95 does")
