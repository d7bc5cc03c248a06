"""Paired intervals and tests against scipy and statsmodels (recorded by record_paired.py) and published numbers."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from lmgym.core.errors import LmgymError
from lmgym.stats.intervals import share_interval, student_t
from lmgym.stats.paired import compare_paired, compare_seeds, mcnemar, sign_flip, tango

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("paired.json").read_text())
differences = some.lists(some.sampled_from([-1.0, -0.5, 0.0, 0.0, 0.25, 1.0]), min_size=1, max_size=30)


# ---------------------------------------------------------------- against other libraries


@pytest.mark.parametrize("case", RECORD["mcnemar"], ids=lambda case: str(case["counts"]))
def test_mcnemar_is_statsmodels(case: dict[str, Any]) -> None:
    assert mcnemar(*case["counts"]) == pytest.approx(case["p"], rel=1e-9)


@pytest.mark.parametrize("case", RECORD["score"], ids=lambda case: f"{case['counts']} {case['confidence']}")
def test_the_score_interval_solves_its_definition(case: dict[str, Any]) -> None:
    interval = tango(*case["counts"], case["confidence"])
    assert [interval.low, interval.high] == pytest.approx(case["interval"], abs=1e-6)


@pytest.mark.parametrize("case", RECORD["sign flip"], ids=lambda case: str(len(case["values"])))
def test_sign_flips_are_scipys(case: dict[str, Any]) -> None:
    # beyond 12 both draw at random: four standard errors of 9,999 draws
    error = 4 * math.sqrt(case["p"] * (1 - case["p"]) / 9999)
    assert sign_flip(case["values"]) == pytest.approx(case["p"], abs=1e-12 if case["exact"] else error)


@pytest.mark.parametrize("case", RECORD["student t"], ids=lambda case: f"{len(case['values'])} {case['confidence']}")
def test_intervals_over_seeds_are_scipys(case: dict[str, Any]) -> None:
    interval = student_t(case["values"], case["confidence"])
    assert [interval.low, interval.high] == pytest.approx(case["interval"], rel=1e-9)
    assert interval.count == len(case["values"])


@pytest.mark.parametrize("case", RECORD["paired t"], ids=lambda case: str(len(case["first"])))
def test_differences_of_seeds_are_scipys(case: dict[str, Any]) -> None:
    result = compare_seeds(case["first"], case["second"])
    assert result.p == pytest.approx(case["p"], abs=1e-12)
    assert [result.difference.low, result.difference.high] == pytest.approx(case["interval"], rel=1e-9)
    assert (result.interval, result.test) == ("t", "t")


@given(some.lists(some.tuples(some.integers(0, 8), some.integers(0, 8)), min_size=1, max_size=6))
def test_p_and_the_interval_of_seeds_agree(pairs: list[tuple[int, int]]) -> None:
    first, second = ([pair[side] / 8 for pair in pairs] for side in (0, 1))
    result = compare_seeds(first, second, shares=True)
    turned = compare_seeds(second, first, shares=True)
    assert result.p == turned.p or (math.isnan(result.p) and math.isnan(turned.p))
    assert (result.higher_first, result.higher_second) == (turned.higher_second, turned.higher_first)
    if len({b - a for a, b in pairs}) == 1:  # a single seed, or differences that are all equal
        assert not result.difference.has_bounds and math.isnan(result.p) and result.test == "none"
    else:
        assert (result.p < 0.05) == (not result.difference.low <= 0 <= result.difference.high)


# ---------------------------------------------------------------- published numbers


@pytest.mark.parametrize(
    ("gained", "lost", "pairs", "low", "high", "digits", "p"),
    [
        # complete response of 161 patients before and after therapy (Cavo et al. 2012): Fagerland, Lydersen & Laake,
        # Statistical Analysis of Contingency Tables (2017), chapter 8, and the tests of its R package contingencytables
        (6, 16, 161, -0.1240, -0.0054, 4, 0.052479),
        # airway hyper-responsiveness of 21 children (Bentur et al. 2009): same chapter; p by hand, 2 (1 + 8) / 2^8
        (1, 7, 21, -0.517, -0.026, 3, 18 / 256),
    ],
)
def test_published_pairs(gained: int, lost: int, pairs: int, low: float, high: float, digits: int, p: float) -> None:
    interval = tango(gained, lost, pairs)
    assert (round(interval.low, digits), round(interval.high, digits)) == (low, high)
    assert mcnemar(gained, lost) == pytest.approx(p, abs=5e-7)


def test_no_pair_that_differs_by_hand() -> None:
    # gained = lost = 0: n d^2 = z^2 d (1 - d), so d = z^2 / (n + z^2) = 3.841459 / 103.841459
    interval = tango(0, 0, 100)
    assert interval.high == pytest.approx(3.841459 / 103.841459, abs=1e-8) and interval.low == -interval.high
    assert mcnemar(0, 0) == 1.0 and sign_flip([0.0, 0.0]) == 1.0


# Student's t, tables of any textbook: two-sided 95 %, 1, 2, 4 and 30 degrees of freedom
@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776), (31, 2.042)])
def test_students_quantiles(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    deviation = math.sqrt(sum((value - (count - 1) / 2) ** 2 for value in values) / (count - 1))
    interval = student_t(values)
    assert (interval.high - interval.mean) * math.sqrt(count) / deviation == pytest.approx(quantile, abs=5e-4)


def test_one_seed_has_no_interval_and_none_is_an_error() -> None:
    assert str(student_t([0.5])) == "0.500 [no interval]"
    with pytest.raises(LmgymError, match="at least one finished run"):
        student_t([])


# ---------------------------------------------------------------- what a comparison says


def test_right_or_wrong_answers() -> None:
    first = [[1.0]] * 8 + [[0.0]] * 12
    second = [[1.0]] * 7 + [[0.0]] + [[1.0]] * 6 + [[0.0]] * 6
    result = compare_paired(first, second)
    assert (result.higher_first, result.equal, result.higher_second) == (1, 13, 6)
    assert (result.first, result.second) == (share_interval([1] * 8 + [0] * 12), share_interval([1] * 13 + [0] * 7))
    assert result.difference == tango(6, 1, 20) and result.p == 0.125  # 2 (1 + 7) / 2^7
    assert (result.interval, result.test) == ("score", "mcnemar")


def test_several_samples_count_as_one_prompt() -> None:
    first, second = [[0, 1], [1, 1], [0, 0], [0, 0]], [[1, 1], [1, 1], [1, 0], [0, 0]]
    result = compare_paired(first, second)
    assert (result.higher_first, result.equal, result.higher_second) == (0, 2, 2)
    assert result.difference.mean == 0.25 and result.difference.count == 4
    # .5, 0, .5, 0: standard error .288675 / 2, t of 3 degrees 3.182446
    half = 3.182446 * 0.288675 / 2
    assert [result.difference.low, result.difference.high] == pytest.approx([0.25 - half, 0.25 + half], abs=1e-5)
    assert result.p == 0.5  # of the patterns ++ +- -+ -- two are as far out
    assert (result.interval, result.test) == ("t", "sign flip")


def test_a_difference_that_is_the_same_for_all_prompts_has_no_interval() -> None:
    """Three prompts, each .1 higher: [.100, .100] would be certain, and t of 2 degrees times nothing is nothing."""
    result = compare_paired([[0.2], [0.3], [0.4]], [[0.3], [0.4], [0.5]])
    assert str(result.difference) == "0.100 [no interval]" and result.interval == "none"
    assert result.p == 0.25 and result.first.has_bounds  # of eight sign patterns two are as far out
    several = compare_paired([[0, 1], [1, 0]], [[0, 1], [1, 0]])
    assert str(several.difference) == "0.000 [no interval]" and several.p == 1.0
    same = compare_paired([[1.0]] * 3, [[1.0]] * 3)  # one right-or-wrong answer each: Tango's has a width
    assert same.difference.low < 0 < same.difference.high


def test_differences_of_a_few_prompts_are_covered() -> None:
    """Four samples of each of three to ten prompts of different difficulty; the second model is better by .1 at each.
    Intervals that are absent say nothing; of the others at least .92 cover, where a bootstrap covers .7 to .88."""
    random = np.random.default_rng(11)
    for prompts in (3, 5, 10):
        covered = known = 0
        for _ in range(600):
            rates = random.beta(0.5, 1.0, size=(prompts, 1)) * 0.9
            first, second = ((random.random((prompts, 4)) < rates + more).tolist() for more in (0.0, 0.1))
            interval = compare_paired(first, second).difference
            known += interval.has_bounds
            covered += interval.low <= 0.1 <= interval.high
        assert covered >= 0.92 * known and known > 400, prompts


def test_pairing_sees_what_two_separate_intervals_do_not() -> None:
    """The problems differ far more than the models: the two intervals overlap, that of the difference is far from 0."""
    first = [[float(place)] for place in range(40)]
    second = [[place + 0.5 + 0.1 * (place % 3)] for place in range(40)]
    result = compare_paired(first, second)
    assert result.first.high > result.second.low
    assert 0.5 <= result.difference.low < result.difference.high <= 0.7 and result.p < 0.001


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Exactly, over all outcomes of 15 pairs of which 30 % are gained and 10 % lost: Tango's about 95 %."""
    gain, loss, pairs, truth = 0.3, 0.1, 15, 0.2
    covered = 0.0
    for gained, lost in itertools.product(range(pairs + 1), repeat=2):
        if gained + lost <= pairs:
            ways = math.comb(pairs, gained) * math.comb(pairs - gained, lost)
            chance = ways * gain**gained * loss**lost * (1 - gain - loss) ** (pairs - gained - lost)
            interval = tango(gained, lost, pairs)
            covered += chance * (interval.low <= truth <= interval.high)
    assert 0.93 < covered < 0.98


@given(differences)
def test_swapping_the_two_turns_everything_round(values: list[float]) -> None:
    first, second = [[0.0]] * len(values), [[value] for value in values]
    one, other = compare_paired(first, second), compare_paired(second, first)
    assert one.p == pytest.approx(other.p, abs=0.03)
    assert one.difference.mean == -other.difference.mean
    assert (one.higher_first, one.equal, one.higher_second) == (other.higher_second, other.equal, other.higher_first)


@given(some.integers(0, 30), some.integers(0, 30), some.integers(0, 60))
def test_the_score_interval_mirrors_and_agrees_with_mcnemar(gained: int, lost: int, ties: int) -> None:
    pairs = max(gained + lost + ties, 1)
    interval, mirror = tango(gained, lost, pairs), tango(lost, gained, pairs)
    assert interval.low == pytest.approx(-mirror.high, abs=1e-9) and interval.low <= interval.mean <= interval.high
    statistic = (gained - lost) ** 2 / max(gained + lost, 1)  # McNemar's, uncorrected: chi-squared, one degree
    if abs(statistic - 3.841459) > 1e-3:
        assert (interval.low > 0 or interval.high < 0) == (statistic > 3.841459)


def test_the_same_numbers_give_the_same_p() -> None:
    values = [0.1 * (place % 7) - 0.25 for place in range(50)]
    assert sign_flip(values) == sign_flip(values) == sign_flip([*values, 0.0])
    assert sign_flip(values, seed=1) != sign_flip(values)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: compare_paired([[1]], [[1], [0]]), "1 prompts with 2; both must answer the same ones"),
        (lambda: compare_paired([], []), "no prompts"),
        (lambda: compare_paired([[]], [[1]]), "prompt 0 has no samples"),
        (lambda: tango(3, 3, 5), "3 and 3 of 5 pairs"),
        (lambda: tango(-1, 0, 5), "-1 and 0 of 5 pairs"),
        (lambda: tango(1, 0, 5, confidence=95), "confidence is 95"),
        (lambda: student_t([0.1, 0.2], confidence=0), "confidence is 0"),
        (lambda: compare_seeds([0.1], [0.1, 0.2]), "1 seeds with 2"),
    ],
)
def test_impossible_numbers_are_told(call: Any, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        call()
