"""What must hold of intervals and pass@k whatever the numbers are."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from lmgym.stats.intervals import (
    SufficientStatistics,
    do_not_overlap,
    mean_interval,
    pass_at_k,
    share_interval,
    student_t,
    sums_interval,
)

confidences = some.floats(0.5, 0.999)
prompts = some.lists(some.lists(some.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=12)
shares = some.lists(some.floats(0, 1), min_size=2, max_size=40)


@given(shares, confidences)
def test_a_share_has_an_interval_within_0_and_1_around_it(values: list[float], confidence: float) -> None:
    interval = share_interval(values, confidence)
    assert 0 <= interval.low <= interval.high <= 1 and interval.low < interval.high
    if confidence >= 0.95:
        assert interval.low <= interval.mean + 1e-12 and interval.mean <= interval.high + 1e-12
    mirror = share_interval([1 - value for value in values], confidence)
    assert [interval.low, interval.high] == pytest.approx([1 - mirror.high, 1 - mirror.low], abs=1e-12)


@given(shares, some.floats(0, 1))
def test_a_share_over_seeds_is_covered_as_often_as_before(values: list[float], truth: float) -> None:
    """The part that is cut off holds no value that can be true: of every truth in [0, 1] the cut interval says what the
    whole one says, so its coverage is the same, draw by draw."""
    whole, cut = student_t(values), student_t(values, share=True)
    assert (cut.mean, cut.count, cut.has_bounds) == (whole.mean, whole.count, whole.has_bounds)
    if whole.has_bounds:
        assert 0 <= cut.low <= cut.high <= 1
        assert (cut.low <= truth <= cut.high) == (whole.low <= truth <= whole.high)


def test_only_what_is_a_share_by_definition_is_cut() -> None:
    assert mean_interval([[1.0], [0.0]]).share and mean_interval([[0.5], [0.2]], shares=True).share
    assert not mean_interval([[0.5], [0.2]]).share
    high = student_t([0.9, 1.0, 1.0]).high
    assert high > 1 and student_t([0.9, 1.0, 1.0], share=True).high == 1.0
    assert student_t([0.0, 0.0, 0.1], share=True).low == 0.0


@given(shares)
def test_more_evidence_or_less_confidence_narrows_it(values: list[float]) -> None:
    interval, more, less = share_interval(values), share_interval(values * 4), share_interval(values, 0.8)
    assert more.high - more.low <= interval.high - interval.low
    assert less.high - less.low <= interval.high - interval.low


@given(some.integers(1, 40).flatmap(lambda n: some.tuples(some.integers(0, n), some.just(n), some.integers(1, n))))
def test_pass_at_k_grows_with_k_and_with_correct_samples(case: tuple[int, int, int]) -> None:
    correct, samples, k = case
    value = pass_at_k(correct, samples, k)
    assert 0 <= value <= 1
    assert pass_at_k(correct, samples, 1) == correct / samples
    if k < samples:
        assert pass_at_k(correct, samples, k + 1) >= value
    if correct < samples:
        assert pass_at_k(correct + 1, samples, k) >= value


def rounding_of(count: int, size: float) -> float:
    """How far two ways to the same bound may differ in fp64: each deviation is off by at most `count` + 8 roundings of
    numbers up to `size`, so is their root mean square; t (at most 12.8) times that is added to the mean."""
    return 2 * (1 + 12.8) * (count + 8) * sys.float_info.epsilon * size


@given(prompts, some.floats(0.1, 10), some.floats(-10, 10))
def test_values_follow_shift_and_scale(values: list[list[float]], scale: float, shift: float) -> None:
    interval = student_t([math.fsum(samples) / len(samples) for samples in values])
    moved = student_t([scale * math.fsum(samples) / len(samples) + shift for samples in values])
    if interval.has_bounds and moved.has_bounds and interval.high - interval.low > 1e-6:
        for ours, theirs in ((interval.mean, moved.mean), (interval.low, moved.low), (interval.high, moved.high)):
            assert abs(scale * ours + shift - theirs) <= rounding_of(len(values), scale * 5 + abs(shift))


@given(prompts)
def test_an_interval_of_values_has_a_width_or_is_absent(values: list[list[float]]) -> None:
    interval = mean_interval(values)
    assert (interval.high > interval.low) == interval.has_bounds
    assert not do_not_overlap(interval, interval) and interval.count == len(values)


@given(some.lists(some.floats(-5, 5), min_size=2, max_size=30))
def test_the_jackknife_of_a_mean_is_students_t(values: list[float]) -> None:
    """Its standard error is then sd / sqrt(n) in algebra."""
    summed = SufficientStatistics(np.array([[value, 1.0] for value in values]), lambda s: s[:, 0] / s[:, 1])
    ours, theirs = sums_interval(summed), student_t(values)
    assert (ours.mean, ours.count) == (pytest.approx(theirs.mean, abs=1e-12), theirs.count)
    if theirs.has_bounds and theirs.high - theirs.low > 1e-6:
        for one, other in ((ours.low, theirs.low), (ours.high, theirs.high)):
            assert abs(one - other) <= len(values) * rounding_of(len(values), 5)  # leaving one out multiplies by n


@given(some.lists(some.lists(some.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=2, max_size=20))
def test_right_or_wrong_answers_always_get_an_interval_with_width(values: list[list[float]]) -> None:
    interval = mean_interval(values)
    assert interval.high > interval.low
