"""What must hold of intervals and pass@k whatever the numbers are."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lmgym.stats import intervals
from lmgym.stats.intervals import clustered_bootstrap, do_not_overlap, mean_interval, pass_at_k, wilson

shares = some.integers(1, 2000).flatmap(lambda trials: some.tuples(some.integers(0, trials), some.just(trials)))
confidences = some.floats(0.5, 0.999)
prompts = some.lists(some.lists(some.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=12)


@given(shares, confidences)
def test_wilson_bounds_solve_the_score_equation(share: tuple[int, int], confidence: float) -> None:
    """A bound is the share p whose own normal test just rejects: |observed - p| = z sqrt(p (1 - p) / n)."""
    interval = wilson(*share, confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    for bound, inside in ((interval.low, share[0] > 0), (interval.high, share[0] < share[1])):
        if inside:
            expected = z * math.sqrt(bound * (1 - bound) / share[1])
            assert abs(interval.mean - bound) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(shares, confidences)
def test_wilson_mirrors_failures(share: tuple[int, int], confidence: float) -> None:
    successes, trials = share
    interval, mirror = wilson(successes, trials, confidence), wilson(trials - successes, trials, confidence)
    assert interval.low == pytest.approx(1 - mirror.high, abs=1e-12)
    assert interval.high == pytest.approx(1 - mirror.low, abs=1e-12)


@given(shares)
def test_more_evidence_or_less_confidence_narrows_wilson(share: tuple[int, int]) -> None:
    successes, trials = share
    interval, more = wilson(successes, trials), wilson(4 * successes, 4 * trials)
    less = wilson(successes, trials, confidence=0.8)
    assert more.high - more.low < interval.high - interval.low
    assert less.high - less.low < interval.high - interval.low


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


@settings(max_examples=50)
@given(prompts, some.integers(0, 2**40))
def test_bootstrap_depends_on_prompt_means_and_seed_only(values: list[list[float]], seed: int) -> None:
    interval = clustered_bootstrap(values, resamples=100, seed=seed)
    assert interval == clustered_bootstrap(values, resamples=100, seed=seed)
    doubled = clustered_bootstrap([samples[::-1] * 2 for samples in values], resamples=100, seed=seed)
    means = [sum(samples) / len(samples) for samples in values]
    for ours, theirs in (
        (interval.mean, doubled.mean),
        (interval.low, doubled.low),
        (interval.high, doubled.high),
    ):
        assert ours == pytest.approx(theirs, abs=1e-12)
        assert min(means) - 1e-12 <= ours <= max(means) + 1e-12
    assert interval.low <= interval.high and interval.count == len(values)


@settings(max_examples=50)
@given(prompts, some.floats(0.1, 10), some.floats(-10, 10))
def test_bootstrap_follows_shift_and_scale(values: list[list[float]], scale: float, shift: float) -> None:
    interval = clustered_bootstrap(values, resamples=100)
    moved = clustered_bootstrap([[scale * value + shift for value in samples] for samples in values], resamples=100)
    for ours, theirs in ((interval.mean, moved.mean), (interval.low, moved.low), (interval.high, moved.high)):
        assert scale * ours + shift == pytest.approx(theirs, abs=1e-9)


def test_seeds_differ_and_large_sets_are_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[float(number % 7)] for number in range(50)]
    interval = clustered_bootstrap(values, seed=0)
    assert interval != clustered_bootstrap(values, seed=1)
    monkeypatch.setattr(intervals, "CELLS", 120)  # two resamples of fifty prompts at a time
    assert clustered_bootstrap(values, seed=0) == interval


@given(some.lists(some.lists(some.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=2, max_size=20))
def test_right_or_wrong_answers_always_get_an_interval_with_width(values: list[list[float]]) -> None:
    interval = mean_interval(values)
    same_mean = len({sum(samples) / len(samples) for samples in values}) == 1
    if not same_mean or interval.mean in (0.0, 1.0):
        assert interval.high > interval.low
    assert not do_not_overlap(interval, interval)
