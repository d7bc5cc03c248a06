"""Intervals and pass@k against published tables and numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest

from lmgym.core.errors import LmgymError
from lmgym.stats.intervals import (
    Interval,
    clustered_bootstrap,
    do_not_overlap,
    mean_interval,
    pass_at_k,
    pass_at_k_each,
    wilson,
)


# Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3 (score, no continuity correction)
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_newcombes_table(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)
    assert interval.mean == successes / trials and interval.count == trials


def test_wilson_at_the_ends_by_hand() -> None:
    # no success in 25: (z^2/2n + z sqrt(z^2/4n^2)) / (1 + z^2/n) = z^2/(n + z^2) = 3.841459/28.841459
    # (Agresti, Categorical Data Analysis, 2nd ed., section 1.4.3, prints 0.0 to 0.133)
    assert wilson(0, 25).low == 0.0
    assert wilson(0, 25).high == pytest.approx(3.841459 / 28.841459, abs=1e-7)
    assert wilson(25, 25).high == 1.0
    # half of 10 at 90%: 1/2 -+ z / (2 sqrt(n + z^2)) = 1/2 -+ 1.6448536 / (2 * 3.5644836) = 1/2 -+ 0.2307281
    assert wilson(5, 10, confidence=0.9).low == pytest.approx(0.5 - 0.2307281, abs=1e-6)


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


def test_bootstrap_of_two_prompts_is_the_whole_range() -> None:
    # resampling prompts of mean 0 and 1 gives 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4
    interval = clustered_bootstrap([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (interval.mean, interval.low, interval.high, interval.count) == (0.5, 0.0, 1.0, 2)


def test_bootstrap_agrees_with_the_normal_interval_of_prompt_means() -> None:
    random = np.random.default_rng(1)
    values = random.normal(3.0, 2.0, size=(400, 1)) + random.normal(0.0, 1.0, size=(400, 4))
    half = 1.959964 * values.mean(axis=1).std() / math.sqrt(400)
    interval = clustered_bootstrap(values.tolist(), resamples=20_000)
    assert interval.mean == pytest.approx(values.mean(), abs=1e-12)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    """100 prompts, 4 samples each of one difficulty: taking the 400 samples as independent fails."""
    random = np.random.default_rng(7)
    clustered, pooled, runs = 0, 0, 300
    for _ in range(runs):
        difficulty = random.beta(0.5, 0.5, size=(100, 1))  # mean 1/2, very different prompts
        values = (random.random((100, 4)) < difficulty).astype(float)
        interval = clustered_bootstrap(values.tolist(), resamples=400)
        naive = wilson(int(values.sum()), values.size)
        clustered += interval.low <= 0.5 <= interval.high
        pooled += naive.low <= 0.5 <= naive.high
    assert 0.90 <= clustered / runs <= 0.99
    assert pooled / runs < 0.85


def test_mean_interval_chooses_by_the_data() -> None:
    assert mean_interval([[1.0], [0.0], [1.0], [1.0]]) == wilson(3, 4)
    assert mean_interval([[1], [0], [True], [False]]) == wilson(2, 4)
    two_each = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert mean_interval(two_each) == clustered_bootstrap(two_each)
    graded = [[0.5], [0.25], [1.0]]
    assert mean_interval(graded) == clustered_bootstrap(graded)
    # all right, k samples each: the bootstrap has no width, and 24 trials would be too many
    assert mean_interval([[1.0] * 8] * 3) == wilson(3, 3)
    assert mean_interval([[0.0] * 8] * 3) == wilson(0, 3)


def test_pass_at_k_of_each_prompt() -> None:
    values = [[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.2, 0.9, 0.0, 0.0]]
    # pass@2: 1 - 3/6, 1 - 1/6, 0
    assert pass_at_k_each(values, k=2) == [[1 / 2], [pytest.approx(5 / 6)], [0.0]]
    # from 0.9 on counts as right: the third prompt has one of four too
    assert pass_at_k_each(values, k=2, threshold=0.9)[2] == [1 / 2]
    assert mean_interval(pass_at_k_each(values, k=4)) == wilson(2, 3)


def test_one_prompt_has_no_interval() -> None:
    interval = mean_interval([[0.0, 1.0, 1.0]])
    assert interval.mean == pytest.approx(2 / 3) and math.isnan(interval.low) and math.isnan(interval.high)
    assert not do_not_overlap(interval, wilson(0, 1000))


def test_do_not_overlap() -> None:
    assert do_not_overlap(Interval(0.4, 0.3, 0.5, 9), Interval(0.7, 0.6, 0.8, 9))
    assert not do_not_overlap(Interval(0.4, 0.3, 0.5, 9), Interval(0.6, 0.5, 0.7, 9))  # they touch
    assert not do_not_overlap(Interval(0.4, 0.1, 0.9, 9), Interval(0.5, 0.4, 0.6, 9))  # one in the other


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: wilson(0, 0), "trials"),
        (lambda: wilson(3, 2), "3 successes of 2"),
        (lambda: wilson(1, 2, confidence=95), "confidence is 95"),
        (lambda: clustered_bootstrap([]), "no prompts"),
        (lambda: mean_interval([[1.0], []]), "prompt 1 has no samples"),
        (lambda: clustered_bootstrap([[1.0]], resamples=0), "resamples is 0"),
        (lambda: pass_at_k(1, 4, 5), "pass@5"),
        (lambda: pass_at_k(5, 4, 2), "5 correct of 4"),
        (lambda: pass_at_k_each([[1.0, 0.0], [1.0]], k=2), "prompt 1 has 1"),
    ],
)
def test_impossible_arguments_are_refused(call, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        call()
