"""Means with confidence intervals, and pass@k. Needs numpy only, so evaluation and logs can use it without torch.

The unit of resampling is the prompt: eight samples of one prompt hold less information than one sample each of eight
prompts. So with several samples per prompt, intervals resample prompts, never single samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lmgym.core import seeds
from lmgym.core.errors import LmgymError

CELLS = 1 << 22  # indices of the bootstrap drawn at once: 32 MiB, for any number of prompts


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; `count` is the number of independent units (prompts).

    `low` and `high` are NaN if no interval can be computed, as for several samples of a single prompt.

    Example:
        >>> str(Interval(mean=0.412, low=0.370, high=0.455, count=512))
        '0.412 [0.370, 0.455]'
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.low) or math.isnan(self.high):
            return f"{self.mean:.3f} [no interval]"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class SufficientStatistics:
    """A metric that is a function of sums over texts, not a mean over texts, as BLEU is of summed n-gram counts.

    `rows` [N K] hold the K counts of each text (or prompt); `value` computes metrics [R] from R rows of sums [R K].

    Example: right words and all words of three texts; the metric is the fraction of all words that are right
        >>> SufficientStatistics(np.array([[1, 2], [3, 3], [0, 5]]), lambda sums: sums[:, 0] / sums[:, 1]).figure
        0.4
    """

    rows: npt.NDArray[Any]
    value: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

    @property
    def figure(self) -> float:
        """The metric of all rows together."""
        return float(self.value(self.rows.sum(0, keepdims=True))[0])


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; reliable for small samples and for proportions near 0 and 1.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = successes/trials, n = trials and z the
    normal quantile at (1 + confidence)/2: E. B. Wilson, JASA 22 (1927), 209-212. Raises LmgymError without
    trials, for more successes than trials and for a confidence outside (0, 1).

    Example: 81 of 263, a case of Newcombe, Statistics in Medicine 17 (1998), 857-872
        >>> str(wilson(81, 263))
        '0.308 [0.255, 0.366]'
    """
    _check_confidence(confidence)
    if trials < 1 or not 0 <= successes <= trials:
        raise LmgymError(
            f"wilson: {successes} successes of {trials} trials; needs 0 <= successes <= trials, trials >= 1"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # The formula gives exactly 0 and 1 at the ends; rounding would give about 1e-17 more or less.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == trials else (centre + half) / scale
    return Interval(share, low, high, trials)


def clustered_bootstrap(
    values: Sequence[Sequence[float]], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean, resampling prompts (clusters) with replacement.

    `values` holds for each prompt the values of its samples. All prompts have the same weight, so the mean is the mean
    of the prompts' means; a resampled prompt brings all its samples (Efron & Tibshirani 1993, chapter 13; for language
    models: Miller, arXiv 2411.00640). The same values and seed give the same interval. A single prompt gives no
    interval (NaN), since it holds no information about the spread between prompts. Raises LmgymError without prompts,
    and for a prompt without samples.

    Example: two prompts that are always right, two that never are
        >>> str(clustered_bootstrap([[1, 1], [1, 1], [0, 0], [0, 0]]))
        '0.500 [0.000, 1.000]'
    """
    _check_confidence(confidence)
    if resamples < 1:
        raise LmgymError(f"clustered_bootstrap: resamples is {resamples}; it must be at least 1")
    means = _prompt_means(values)
    if len(means) == 1:
        return Interval(float(means[0]), math.nan, math.nan, 1)
    drawn = np.concatenate([means[chosen].mean(axis=1) for chosen in resampled(len(means), resamples, seed)])
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(means.mean()), float(low), float(high), len(means))


def sums_bootstrap(
    summed: SufficientStatistics, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """A metric of sums (with one row per prompt) and its percentile bootstrap over prompts.

    P. Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004 (W04-3250), section 3. No
    interval (NaN) for a single prompt, if the metric of a resample is undefined, and if all resamples have the same
    metric, as when no text has a right word: equal resamples do not mean certainty.

    Example: sums_bootstrap(bleu.corpus.sums(texts, examples)) -> Interval(mean=0.31, low=0.28, high=0.34, count=500)
    """
    _check_confidence(confidence)
    if len(summed.rows) < 2:
        return Interval(summed.figure, math.nan, math.nan, len(summed.rows))
    drawn = sums_draws(summed, resamples, seed)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    if drawn.min() == drawn.max():
        low = high = math.nan
    return Interval(summed.figure, float(low), float(high), len(summed.rows))


def sums_draws(summed: SufficientStatistics, resamples: int, seed: int) -> npt.NDArray[Any]:
    """The metric [R] of each resample of the prompts. The same number of prompts and seed give the same resamples."""
    # Multiply each row by how often its prompt was drawn, and add up.
    count = len(summed.rows)
    often = (np.stack([np.bincount(one, minlength=count) for one in chosen])
             for chosen in resampled(count, resamples, seed))  # fmt: skip
    return np.concatenate([summed.value(times @ summed.rows) for times in often])


def resampled(count: int, resamples: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices [r count] of a bootstrap, drawn with replacement, some resamples at a time."""
    random = seeds.generator("bootstrap", seed)
    rows = max(1, CELLS // count)
    for start in range(0, resamples, rows):
        yield random.integers(count, size=(min(rows, resamples - start), count))


def mean_interval(values_per_prompt: Sequence[Sequence[float]], confidence: float = 0.95, seed: int = 0) -> Interval:
    """The mean over prompts and its interval: Wilson's for one sample of 0 or 1 per prompt, else a clustered bootstrap.

    If all samples of all prompts are 0, or all are 1, a bootstrap interval would have width 0. Then it is Wilson's
    interval for that number of prompts, which is wide enough for any correlation between a prompt's samples.

    Example:
        >>> str(mean_interval([[1.0], [0.0], [1.0], [1.0]]))
        '0.750 [0.301, 0.954]'
    """
    means = _prompt_means(values_per_prompt)
    samples = [value for samples in values_per_prompt for value in samples]
    one_each = len(samples) == len(means)
    if set(samples) <= {0, 1} and (one_each or len(set(samples)) == 1):
        return wilson(round(float(means.sum())), len(means), confidence)
    return clustered_bootstrap(values_per_prompt, confidence, seed=seed)


def student_t(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of independent runs (seeds) and its interval: mean -+ t sd / sqrt(n), t with n - 1 degrees of freedom.

    Student, Biometrika 6 (1908), 1-25; sd divides by n - 1. For few seeds the quantile is large: 12.7 for two, 4.3 for
    three, 2.8 for five. The interval is about other seeds on the same examples, not about other examples. A single
    value gives no interval (NaN). Raises LmgymError without values.

    Example:
        >>> str(student_t([0.60, 0.64, 0.62]))
        '0.620 [0.570, 0.670]'
    """
    _check_confidence(confidence)
    if not len(values):
        raise LmgymError("there are no values to average over; a table over seeds needs at least one finished run")
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = _t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """pass@k: the probability that at least one of k samples is correct; an unbiased estimate from samples >= k.

    1 - C(samples - correct, k) / C(samples, k): Chen et al., arXiv 2107.03374, equation 1, in exact integers.
    Raises LmgymError unless 1 <= k <= samples and 0 <= correct <= samples.

    Example: 1 of 4 samples is right, so half of the 6 pairs hold it
        >>> pass_at_k(correct=1, samples=4, k=2)
        0.5
    """
    if not 1 <= k <= samples:
        raise LmgymError(f"pass@{k} needs 1 <= k <= samples per prompt; there are {samples} samples")
    if not 0 <= correct <= samples:
        raise LmgymError(f"pass@{k}: {correct} correct of {samples} samples is impossible")
    draws = math.comb(samples, k)
    return (draws - math.comb(samples - correct, k)) / draws


def pass_at_k_each(values_per_prompt: Sequence[Sequence[float]], k: int, threshold: float = 1.0) -> list[list[float]]:
    """Each prompt's pass@k, as input for `mean_interval`; a sample is correct if its value is at least `threshold`.

    `mean_interval` then resamples prompts. If every estimate is 0 or 1 (always so if k is the number of samples), each
    prompt is one trial and the interval is Wilson's. Raises LmgymError if a prompt has fewer than k samples.

    Example:
        >>> str(mean_interval(pass_at_k_each([[0, 1], [1, 1], [0, 0]], k=2)))
        '0.667 [0.208, 0.939]'
    """
    for number, samples in enumerate(values_per_prompt):
        if len(samples) < k:
            raise LmgymError(f"pass@{k} needs {k} or more samples per prompt; prompt {number} has {len(samples)}")
    correct = [sum(value >= threshold for value in samples) for samples in values_per_prompt]
    sizes = [len(samples) for samples in values_per_prompt]
    return [[pass_at_k(right, size, k)] for right, size in zip(correct, sizes, strict=True)]


def do_not_overlap(a: Interval, b: Interval) -> bool:
    """True if one interval ends before the other begins; False if one of them has no bounds.

    Example:
        >>> do_not_overlap(wilson(200, 512), wilson(430, 512))
        True
    """
    return a.high < b.low or b.high < a.low


def _t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution with `freedom` degrees of freedom, for a probability above 1/2.
    Bisection of the distribution function in Abramowitz & Stegun 26.7.3 and 26.7.4, sums of freedom / 2 terms."""

    def inside(t: float) -> float:  # the probability between -t and t
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

    # Find an upper bound, then halve the range 80 times, to below the precision of a float.
    low, high = 0.0, 1.0
    while inside(high) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * probability - 1 else (low, middle)
    return high


def _prompt_means(values: Sequence[Sequence[float]]) -> np.ndarray:
    if not len(values):
        raise LmgymError("there are no prompts to average over; the evaluation set is empty")
    for number, samples in enumerate(values):
        if not len(samples):
            raise LmgymError(f"prompt {number} has no samples; each prompt needs at least one value")
    return np.array([sum(samples) / len(samples) for samples in values], dtype=np.float64)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise LmgymError(f"confidence is {confidence}; it must lie between 0 and 1, as 0.95 does")
