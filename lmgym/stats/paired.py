"""Two models on the same examples: the interval and the test of their paired difference. Numpy only.

Pairing removes the variance of the examples: a hard problem is hard for both models. A difference is second minus
first, one number per prompt, and the prompt is the independent unit (see intervals.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist

import numpy as np

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.stats.intervals import (
    Interval,
    SufficientStatistics,
    check_confidence,
    jackknife_interval,
    jackknifed,
    mean_interval,
    student_t,
    sums_interval,
    t_probability,
)

CELLS = 1 << 22  # signs that a test draws at once: 32 MiB, for any number of prompts
EXACT = 12  # up to so many non-zero differences, all 2^m sign patterns are tried


@dataclass(frozen=True)
class Paired:
    """One metric of two models on the same prompts, or of two settings with the same seeds.

    `first`, `second`: the mean of each; `difference`: second minus first, of the same prompts or seeds. `p`: the
    two-sided p-value of no difference, NaN without a test. `higher_first`, `equal`, `higher_second` are numbers of
    prompts or seeds, None for a corpus metric, which single prompts do not have.

    Example: compare_paired([[1], [0]], [[1], [1]]).difference -> Interval(mean=0.5, low=..., high=..., count=2)"""

    first: Interval
    second: Interval
    difference: Interval
    p: float
    higher_first: int | None
    equal: int | None
    higher_second: int | None
    interval: str  # "score" (Tango), "t", "jackknife" or "none"
    test: str  # "mcnemar", "sign flip", "t" or "none"


def compare_paired(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    confidence: float = 0.95,
    seed: int = 0,
    shares: bool = False,
) -> Paired:
    """Compare two models by the values of their answers, given per prompt and sample.

    One right-or-wrong answer to each prompt: Tango's score interval and McNemar's exact test. Anything else (other
    values, several samples): Student's t and a sign-flip test of the prompts' differences; no interval for a single
    prompt, nor if all differences are equal. `shares`: as `mean_interval` takes it. Raises LmgymError for no prompts,
    for a prompt without samples, and for different numbers of prompts.

    Example: 20 prompts; 6 of them only the second model has right, 1 only the first
        >>> result = compare_paired([[1]] * 8 + [[0]] * 12, [[1]] * 7 + [[0]] + [[1]] * 6 + [[0]] * 6)
        >>> str(result.difference), round(result.p, 3)
        ('0.250 [-0.011, 0.488]', 0.125)
    """
    if len(first) != len(second):
        raise LmgymError(
            f"paired comparison of {len(first)} prompts with {len(second)}; both must answer the same ones"
        )
    means = mean_interval(first, confidence, shares), mean_interval(second, confidence, shares)
    differences = [  # fsum: the same values in another order must give no difference
        math.fsum(b) / len(b) - math.fsum(a) / len(a) for a, b in zip(first, second, strict=True)
    ]
    signs = [(difference > 0) - (difference < 0) for difference in differences]
    lower, higher = signs.count(-1), signs.count(1)
    counts = (lower, signs.count(0), higher)
    if all(len(samples) == 1 and samples[0] in (0, 1) for samples in [*first, *second]):
        difference = tango(higher, lower, len(signs), confidence)
        return Paired(*means, difference, mcnemar(higher, lower), *counts, "score", "mcnemar")
    difference = student_t(differences, confidence)
    method = "t" if difference.has_bounds else "none"
    return Paired(*means, difference, sign_flip(differences, seed=seed), *counts, method, "sign flip")


def compare_summed(
    first: SufficientStatistics,
    second: SufficientStatistics,
    confidence: float = 0.95,
    flips: int = 9999,
    seed: int = 0,
) -> Paired:
    """Compare two models by a corpus metric, such as BLEU; both have a row for each prompt.

    The interval is that of a paired jackknife: both metrics without the same prompt (see `sums_interval`). The test
    swaps the two models' answers to random prompts, as `sign_flip` does for means (S. Riezler and J. Maxwell, W05-0908,
    section 4); there is none for an undefined difference. Raises LmgymError for different numbers of prompts.

    Example: compare_summed(a, b).difference -> Interval(mean=0.012, low=0.004, high=0.021, count=500)"""
    if len(first.rows) != len(second.rows):
        raise LmgymError(
            f"paired comparison of {len(first.rows)} prompts with {len(second.rows)}; both must answer the same ones"
        )
    # 1. Each model's metric, and the interval of their difference.
    one, two = sums_interval(first, confidence), sums_interval(second, confidence)
    difference = jackknife_interval(two.mean - one.mean, jackknifed(second) - jackknifed(first), confidence)
    # 2. The test: how many random swaps give a difference at least as large as the observed one, up to rounding.
    observed, random, hits = abs(difference.mean) * (1 - 1e-12), seeds.generator("swap", seed), 0
    both, rows = first.rows + second.rows, max(1, CELLS // len(first.rows))
    for start in range(0, flips, rows):
        swapped = random.integers(2, size=(min(rows, flips - start), len(first.rows)))
        mixed = (1 - swapped) @ first.rows + swapped @ second.rows
        # A swap whose difference is undefined (NaN) counts as one that is as large.
        hits += int((~(abs(first.value(mixed) - second.value(both.sum(0) - mixed)) < observed)).sum())
    p = (1 + hits) / (1 + flips) if math.isfinite(difference.mean) else math.nan
    method = "jackknife" if difference.has_bounds else "none"
    test = "none" if math.isnan(p) else "sign flip"
    return Paired(one, two, difference, p, None, None, None, method, test)


def compare_seeds(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, shares: bool = False
) -> Paired:
    """Compare two settings by the results of their runs, one number per seed; entry i of both has the same seed.

    Student's t interval and paired t test of the differences, so p is below 1 - `confidence` exactly if the interval
    leaves 0 out. (Signs alone could not tell: of three seeds the smallest p of `sign_flip` is 0.25.) Neither if there
    is a single seed, or all differences are equal. Raises LmgymError without seeds and for different numbers of them.

    Example: three seeds; t = 0.06 / (0.02 / sqrt(3)) = 5.196 with 2 degrees of freedom
        >>> result = compare_seeds([0.50, 0.60, 0.55], [0.54, 0.66, 0.63])
        >>> str(result.difference), round(result.p, 4)
        ('0.060 [0.010, 0.110]', 0.0351)
    """
    if len(first) != len(second):
        raise LmgymError(f"paired comparison of {len(first)} seeds with {len(second)}; both must have the same ones")
    differences = [b - a for a, b in zip(first, second, strict=True)]
    difference, p = student_t(differences, confidence), math.nan
    if difference.has_bounds:
        error = np.std(differences, ddof=1) / math.sqrt(len(differences))
        p = 1 - t_probability(abs(difference.mean) / float(error), len(differences) - 1)
    counts = (sum(d < 0 for d in differences), differences.count(0), sum(d > 0 for d in differences))
    means = student_t(first, confidence, shares), student_t(second, confidence, shares)
    method = "t" if difference.has_bounds else "none"
    return Paired(*means, difference, max(p, 0.0), *counts, method, method)


def untested(first: Interval, second: Interval) -> Paired:
    """Two metrics whose difference has neither interval nor test, such as numbers of distinct words."""
    difference = Interval(second.mean - first.mean, math.nan, math.nan, first.count)
    return Paired(first, second, difference, math.nan, None, None, None, "none", "none")


def tango(gained: int, lost: int, pairs: int, confidence: float = 0.95) -> Interval:
    """Score interval of the difference of two paired proportions, (gained - lost) / pairs.

    All d with (gained - lost - n d)^2 <= z^2 n (2 q + d (1 - d)), where q is the maximum-likelihood probability to lose
    a pair given the difference d: the larger root of
    2n q^2 + (-gained - lost + (2n - gained + lost) d) q - lost d (1 - d) = 0.
    T. Tango, Statistics in Medicine 17 (1998), 891-908. It is reliable for few pairs, and has a width above 0 even if
    no pair differs. At d = 0 it is McNemar's asymptotic test, so it nearly always agrees with the exact one below.
    Raises LmgymError for impossible counts.

    Example: 6 and 16 of 161 pairs differ (Fagerland et al., Statistics in Medicine 33 (2014), 2850-2875)
        >>> str(tango(6, 16, 161))
        '-0.062 [-0.124, -0.005]'
    """
    if pairs < 1 or min(gained, lost) < 0 or gained + lost > pairs:
        raise LmgymError(f"tango: {gained} and {lost} of {pairs} pairs; needs pairs >= 1 and no more than all of them")
    check_confidence(confidence)
    squared = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    estimate = (gained - lost) / pairs

    def inside(d: float) -> bool:
        linear = -gained - lost + (2 * pairs - gained + lost) * d
        root = math.sqrt(max(linear * linear + 8 * pairs * lost * d * (1 - d), 0.0))
        q = (root - linear) / (4 * pairs)
        return (gained - lost - pairs * d) ** 2 <= squared * pairs * max(2 * q + d * (1 - d), 0.0)

    bounds = []
    for outer in (-1.0, 1.0):
        within, beyond = estimate, outer
        for _ in range(60):
            middle = (within + beyond) / 2
            within, beyond = (middle, beyond) if inside(middle) else (within, middle)
        bounds.append(outer if estimate == outer else within)
    return Interval(estimate, bounds[0], bounds[1], pairs)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of no difference: each pair that differs is gained or lost with probability 1/2.

    min(1, 2 P(X <= min(gained, lost))), X binomial(gained + lost, 1/2): Q. McNemar, Psychometrika 12 (1947), 153-157,
    in exact integers; the sign test on right-or-wrong answers.

    Example: of 7 pairs that differ 6 are gained: 2 (1 + 7) / 2^7: mcnemar(6, 1) -> 0.125"""
    pairs, ways, total = gained + lost, 1, 0
    for less in range(min(gained, lost) + 1):
        total += ways
        ways = ways * (pairs - less) // (less + 1)
    return min(1.0, 2 * total / 2**pairs)


def sign_flip(differences: Sequence[float], resamples: int = 9999, seed: int = 0) -> float:
    """Two-sided p-value of no difference, from paired differences of any size, whose signs would then be random.

    The share of sign patterns whose sum is at least as far from 0 as the observed one. With up to 12 non-zero
    differences all patterns are tried; with more, `resamples` random ones and the observed one, which gives
    (1 + hits) / (1 + resamples) and never 0 (Phipson & Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010), 39). R. A.
    Fisher, The Design of Experiments (1935), section 21; for language systems: Dror et al., ACL 2018 (P18-1128),
    section 3.2. The same differences and seed give the same number.

    Example: of the 8 sign patterns of 1, 2, 3 two have a sum of 6 or -6: sign_flip([1.0, 2.0, 3.0]) -> 0.25"""
    values = np.array([value for value in differences if value], dtype=np.float64)
    if len(values):  # sums of huge values must not overflow; a power of two changes no digit
        values = np.ldexp(values, -int(np.frexp(abs(values).max())[1]))
    observed = abs(values.sum()) * (1 - 1e-12)  # sums in another order may be lower by rounding
    if len(values) <= EXACT:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(values)))).reshape(2 ** len(values), len(values))
        return float((abs(signs @ values) >= observed).mean())
    random, hits, rows = seeds.generator("sign flip", seed), 0, max(1, CELLS // len(values))
    for start in range(0, resamples, rows):
        signs = random.integers(2, size=(min(rows, resamples - start), len(values))) * 2.0 - 1.0
        hits += int((abs(signs @ values) >= observed).sum())
    return (1 + hits) / (1 + resamples)
