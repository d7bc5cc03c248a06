"""Best-of-n and majority votes against counting all draws, and what must hold of them for any numbers."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from lmgym.core.errors import LmgymError
from lmgym.core.registry import get
from lmgym.stats.intervals import pass_at_k
from lmgym.stats.selection import best_of, majority
from tests import runs

answers = some.lists(some.tuples(some.integers(0, 4), some.integers(0, 3)), min_size=1, max_size=7)


@given(answers, some.data())
def test_best_of_counts_all_draws(pairs: list[tuple[int, int]], data: some.DataObject) -> None:
    """Of each draw of k, the mean of the values that are liked best. Sums of at most 35 terms up to 4."""
    k = data.draw(some.integers(1, len(pairs)))
    found = []
    for draw in itertools.combinations(pairs, k):
        top = max(liked for _, liked in draw)
        # any of the equally liked, also of those that were not drawn: they stand for each other
        alike = [value for value, liked in pairs if liked == top]
        found.append(sum(alike) / len(alike))
    values, liked = ([float(one) for one in own] for own in zip(*pairs, strict=True))
    assert best_of(values, liked, k) == pytest.approx(sum(found) / len(found), rel=1e-12, abs=1e-12)
    assert best_of(values, [0.0] * len(values), k) == pytest.approx(sum(values) / len(values), rel=1e-12, abs=1e-12)


def test_equally_liked_answers_are_chosen_with_equal_chances() -> None:
    """The closed form of the test above, that of ties, is itself right: by drawing, then choosing, all by counting."""
    pairs = [(0.0, 1), (1.0, 1), (5.0, 0), (2.0, 1), (7.0, 2)]
    for k in range(1, 6):
        each = []
        for draw in itertools.combinations(pairs, k):
            top = [value for value, liked in draw if liked == max(one for _, one in draw)]
            each.append(sum(top) / len(top))
        values, liked = ([float(one) for one in own] for own in zip(*pairs, strict=True))
        assert best_of(values, liked, k) == pytest.approx(sum(each) / len(each), rel=1e-12)


@given(some.integers(1, 40), some.data())
def test_a_judge_that_knows_the_answer_gives_pass_at_k(count: int, data: some.DataObject) -> None:
    right = data.draw(some.integers(0, count))
    k = data.draw(some.integers(1, count))
    values = [1.0] * right + [0.0] * (count - right)
    assert best_of(values, values, k) == pytest.approx(pass_at_k(right, count, k), rel=1e-12)


@given(some.lists(some.sampled_from(["7", "8", "9", None]), min_size=1, max_size=12), some.data())
def test_majority_counts_votes(votes: list[str | None], data: some.DataObject) -> None:
    k = data.draw(some.integers(1, len(votes)))
    values = [float(vote == "8") for vote in votes]
    runs_of_k = [votes[start : start + k] for start in range(0, len(votes) - k + 1, k)]
    expected = []
    for own in runs_of_k:
        counts = Counter(vote for vote in own if vote)
        winners = [vote for vote, number in counts.items() if number == max(counts.values())]
        expected.append(("8" in winners) / len(winners) if winners else 0.0)
    assert majority(values, votes, k) == pytest.approx(sum(expected) / len(expected), rel=1e-12)
    assert majority(values, votes, 1) == pytest.approx(sum(values) / len(values))


def test_wrong_numbers_of_answers() -> None:
    for wrong in (0, 3):
        with pytest.raises(LmgymError, match="there are 2"):
            best_of([1.0, 0.0], [1.0, 0.0], wrong)
        with pytest.raises(LmgymError, match="there are 2"):
            majority([1.0, 0.0], ["1", "2"], wrong)


def test_votes() -> None:
    final, equal = (get("reward", name).vote for name in ("final_answer", "math_equal"))
    assert final("so #### 1,800.0") == final("The answer is $1800") == "1800" and final("none") is None
    assert equal(r"\boxed{0.5}") == equal(r"is $\boxed{\frac12}$") == "1/2" and equal(r"\boxed{") is None
    assert equal(r"\boxed{x + 1}") == equal(r"\boxed{x+1}") != equal(r"\boxed{1+x}")


@pytest.mark.slow
def test_evaluations_report_them(tmp_path: Path) -> None:
    """A judge that likes long answers, of eight: their length rises with K, and what else it picks is reported."""
    evaluation = {"every": 0, "examples": 6, "samples": 8, "temperature": 1.0, "best_of": "length"}
    metrics = {"final_answer": {}}
    rewards = {"length": {"unit": "characters", "target": 60}, "regex": {"pattern": "[0-9]"}}
    run = runs.run(tmp_path / "run", rewards=rewards, evaluation={**evaluation, "metrics": metrics}, steps=1)
    record = [one for one in runs.records(run / "metrics.jsonl") if one["kind"] == "evaluation"][-1]
    lengths = [record["length"], *(record[f"length/best@{k}"] for k in (2, 4, 8))]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert math.isfinite(record["regex/best@8"]) and "final_answer/best@8" in record
    assert {f"final_answer/maj@{k}" for k in (2, 4, 8)} <= record.keys()
    with pytest.raises(LmgymError, match=r"evaluation\.best_of: there is no reward or metric 'lenght'"):
        runs.run(tmp_path / "other", evaluation={**evaluation, "best_of": "lenght"})
    with pytest.raises(LmgymError, match=r"evaluation\.best_of picks one of several answers, and samples is 1"):
        runs.run(tmp_path / "third", evaluation={"best_of": "length"})
