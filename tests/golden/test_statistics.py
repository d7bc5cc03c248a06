"""Intervals and pass@k against published tables and numbers worked by hand."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from lmgym.core.errors import LmgymError
from lmgym.stats.intervals import (
    Interval,
    do_not_overlap,
    mean_interval,
    pass_at_k,
    pass_at_k_each,
    share_interval,
    student_t,
)


# Student's t by hand: quantiles of any table, two-sided 95 %
def test_shares_by_hand() -> None:
    # none of 25: 25 zeros, and a 0 and a 1 more, have mean 1/27 and variance 1/27, so the upper end is (1 + t) / 27
    # with 26 degrees of freedom; the lower end would be negative
    interval = mean_interval([[0.0]] * 25)
    assert (interval.mean, interval.low, interval.count) == (0.0, 0.0, 25)
    assert interval.high == pytest.approx((1 + 2.0555) / 27, abs=5e-6)
    # half of 8: 5 of 10, variance 10/36, t of 9 degrees
    half = 2.2622 * math.sqrt(10 / 36 / 10)
    even = mean_interval([[1], [0], [True], [False]] * 2)
    assert [even.low, even.high] == pytest.approx([0.5 - half, 0.5 + half], abs=5e-5)
    # four samples of each of three prompts: shares 1/4, 0, 1/2 and 0, 1 have mean .35 and variance .7 / 4
    several = mean_interval([[0, 0, 0, 1], [0] * 4, [1, 0, 0, 1]])
    assert several.mean == 0.25 and several.low == 0.0
    assert several.high == pytest.approx(0.35 + 2.7764 * math.sqrt(0.175 / 5), abs=5e-5)


def test_values_by_hand() -> None:
    # 1, 2, 6: mean 3, variance 7, t of 2 degrees
    interval = mean_interval([[1.0], [2.0], [6.0]])
    half = 4.3027 * math.sqrt(7 / 3)
    assert [interval.low, interval.high] == pytest.approx([3 - half, 3 + half], abs=5e-4)
    assert interval == student_t([1.0, 2.0, 6.0]) == mean_interval([[0.5, 1.5], [2.0], [8.0, 4.0]])


def test_interval_prints_three_digits() -> None:
    assert str(Interval(0.412, 0.370, 0.455, 512)) == "0.412 [0.370, 0.455]"
    assert str(Interval(0.412, math.nan, math.nan, 1)) == "0.412 [no interval]"


def test_pass_at_k_by_hand_and_by_counting() -> None:
    # Chen et al., arXiv 2107.03374, equation 1: 1 - C(n - c, k) / C(n, k)
    assert pass_at_k(1, 4, 2) == 0.5  # 1 - 3/6
    assert pass_at_k(2, 5, 3) == 0.9  # 1 - 1/10
    assert pass_at_k(0, 5, 5) == 0.0 and pass_at_k(3, 5, 3) == 1.0
    for samples, correct in itertools.product(range(1, 7), range(7)):
        for k in range(1, samples + 1):
            if correct <= samples:
                draws = list(itertools.combinations(range(samples), k))
                hits = sum(any(sample < correct for sample in draw) for draw in draws)
                assert pass_at_k(correct, samples, k) == pytest.approx(hits / len(draws), abs=1e-15)


def test_pass_at_k_does_not_overflow_or_cancel() -> None:
    # 1 right of 10,000: any k of them hold it with probability k/n, to the last bit
    assert pass_at_k(1, 10_000, 100) == 0.01
    assert pass_at_k(9_999, 10_000, 1) == 0.9999


def chance(counts: Sequence[int], samples: int, rate: float, correlation: float) -> float:
    """The probability that prompts have so many right samples each, in this order. A prompt's own rate is beta
    distributed around `rate`; two samples of one prompt correlate by `correlation`."""

    def rising(start: float, steps: int) -> float:
        return math.prod(start + step for step in range(steps))

    if correlation == 0:
        return math.prod(math.comb(samples, c) * rate**c * (1 - rate) ** (samples - c) for c in counts)
    if correlation == 1:
        return math.prod({0: 1 - rate, samples: rate}.get(c, 0.0) for c in counts)
    a, b = (share * (1 / correlation - 1) for share in (rate, 1 - rate))
    whole = rising(a + b, samples)
    return math.prod(math.comb(samples, c) * rising(a, c) * rising(b, samples - c) / whole for c in counts)


@pytest.mark.parametrize(("prompts", "samples"), [(2, 1), (3, 4), (5, 4), (10, 1), (10, 2), (12, 3), (40, 1)])
def test_the_interval_of_a_share_covers_the_truth(prompts: int, samples: int) -> None:
    """Exactly, over all outcomes, down to one success in 200 samples; .93 where the outcomes' steps do not allow .95.
    What lmgym had before fell to .75 (a bootstrap over prompts) and .83 (Wilson's interval)."""
    outcomes = list(itertools.combinations_with_replacement(range(samples + 1), prompts))
    ways = [math.factorial(prompts) / math.prod(map(math.factorial, Counter(o).values())) for o in outcomes]
    intervals = [mean_interval([[1.0] * c + [0.0] * (samples - c) for c in o]) for o in outcomes]
    assert all(0 <= i.low <= i.mean <= i.high <= 1 and i.low < i.high for i in intervals)
    for rate in (0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5):
        for correlation in (0, 0.2, 0.6, 1):
            covered = total = 0.0
            for outcome, number, interval in zip(outcomes, ways, intervals, strict=True):
                own = number * chance(outcome, samples, rate, correlation)
                total += own
                covered += own * (interval.low <= rate <= interval.high)
            assert total == pytest.approx(1)
            assert covered >= 0.93, (rate, correlation)


def test_the_interval_of_values_covers_the_truth() -> None:
    """Three prompts of normal values, where t is exact: 4,000 draws, within four standard errors of .95."""
    random, covered = np.random.default_rng(5), 0
    for values in random.normal(3.0, 2.0, size=(4000, 3)).tolist():
        interval = mean_interval([[value] for value in values])
        covered += interval.low <= 3.0 <= interval.high
    assert abs(covered / 4000 - 0.95) <= 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_samples_of_a_prompt_are_no_independent_evidence() -> None:
    """Right or wrong by the prompt alone: eight samples of each say no more than one."""
    prompts = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert mean_interval([[value] * 8 for value in prompts]) == mean_interval([[value] for value in prompts])


def test_an_interval_that_cannot_be_had_is_absent() -> None:
    for values in ([[0.1], [0.1], [0.1]], [[3.0, 5.0], [4.0]], [[0.1 + 0.2], [0.3]], [[0.5]], [[1.0]], [[0.0, 1.0]]):
        interval = mean_interval(values)
        assert not interval.has_bounds and str(interval).endswith(" [no interval]")
    assert mean_interval([[1.0] * 8] * 3).high == 1.0 and mean_interval([[1.0] * 8] * 3).low < 0.5
    assert mean_interval([[0.5], [0.5]], shares=True).has_bounds  # of pass@k: between 0 and 1 by definition


def test_pass_at_k_of_each_prompt() -> None:
    values = [[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.2, 0.9, 0.0, 0.0]]
    # pass@2: 1 - 3/6, 1 - 1/6, 0
    assert pass_at_k_each(values, k=2) == [[1 / 2], [pytest.approx(5 / 6)], [0.0]]
    # from 0.9 on counts as right: the third prompt has one of four too
    assert pass_at_k_each(values, k=2, threshold=0.9)[2] == [1 / 2]
    assert mean_interval(pass_at_k_each(values, k=4)) == share_interval([1, 1, 0])


def test_one_prompt_has_no_interval() -> None:
    interval = mean_interval([[0.0, 1.0, 1.0]])
    assert interval.mean == pytest.approx(2 / 3) and math.isnan(interval.low) and math.isnan(interval.high)
    assert not do_not_overlap(interval, share_interval([0.0] * 1000))


def test_do_not_overlap() -> None:
    assert do_not_overlap(Interval(0.4, 0.3, 0.5, 9), Interval(0.7, 0.6, 0.8, 9))
    assert not do_not_overlap(Interval(0.4, 0.3, 0.5, 9), Interval(0.6, 0.5, 0.7, 9))  # they touch
    assert not do_not_overlap(Interval(0.4, 0.1, 0.9, 9), Interval(0.5, 0.4, 0.6, 9))  # one in the other


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: share_interval([]), "no prompts"),
        (lambda: share_interval([0.0, 1.0], confidence=95), "confidence is 95"),
        (lambda: mean_interval([]), "no prompts"),
        (lambda: mean_interval([[1.0], []]), "prompt 1 has no samples"),
        (lambda: pass_at_k(1, 4, 5), "pass@5"),
        (lambda: pass_at_k(5, 4, 2), "5 correct of 4"),
        (lambda: pass_at_k_each([[1.0, 0.0], [1.0]], k=2), "prompt 1 has 1"),
    ],
)
def test_impossible_arguments_are_refused(call, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        call()
