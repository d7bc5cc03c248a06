"""What must hold of intervals and pass@k whatever the numbers are."""

import math

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


@given(prompts, some.floats(0.1, 10), some.floats(-10, 10))
def test_values_follow_shift_and_scale(values: list[list[float]], scale: float, shift: float) -> None:
    interval = student_t([math.fsum(samples) / len(samples) for samples in values])
    moved = student_t([scale * math.fsum(samples) / len(samples) + shift for samples in values])
    if interval.has_bounds and moved.has_bounds and interval.high - interval.low > 1e-6:
        for ours, theirs in ((interval.mean, moved.mean), (interval.low, moved.low), (interval.high, moved.high)):
            assert scale * ours + shift == pytest.approx(theirs, rel=1e-7, abs=1e-7)


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
        assert [ours.low, ours.high] == pytest.approx([theirs.low, theirs.high], rel=1e-6, abs=1e-9)


@given(some.lists(some.lists(some.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=2, max_size=20))
def test_right_or_wrong_answers_always_get_an_interval_with_width(values: list[list[float]]) -> None:
    interval = mean_interval(values)
    assert interval.high > interval.low
