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
from lmgym.rewards.base import Reward
from lmgym.rewards.building import build_rewards
from lmgym.rollouts.evaluate import chosen_by, is_share, measured
from lmgym.rollouts.rollout import apply_rewards
from lmgym.stats.intervals import mean_interval, pass_at_k
from lmgym.stats.selection import best_of, majority
from lmgym.types import Episode, Example, Turn
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


@pytest.mark.parametrize("name", ["final_answer", "math_equal"])
@pytest.mark.parametrize("huge", ["The answer is 1e9999", r"\boxed{7e4400}", "#### 1e-9999"])
def test_no_number_is_too_large_for_an_evaluation(name: str, huge: str) -> None:
    """A power of four digits is no number, so that none has more digits than Python writes."""
    rewards, texts = build_rewards({name: 1.0}), ["#### 4", "#### 4", huge, "#### 9e999"]
    turns = [[Turn([1], [2], text=text)] for text in texts]
    group = [Episode(Example("a/0", "?", ("4",)), 0, n, own) for n, own in enumerate(turns)]
    apply_rewards(group, rewards)
    found = measured([group], rewards)
    assert found[f"{name}/maj@4"] == [[1.0]] and len({get("reward", name).vote(text) for text in texts}) == 3


def test_the_best_of_right_and_wrong_answers_is_a_share() -> None:
    """Its interval is that of shares, which ends at 1; that of a number of any size does not."""
    example, rewards = Example("a/0", "?"), [Reward(name, 1.0, lambda t, _: []) for name in ("right", "judge")]
    groups = []
    for place in range(12):
        parts = [{"right": float(place > 0 or n != 2), "judge": place + 0.1 * n} for n in range(4)]
        own = [Episode(example, place, n, [Turn([1], [2])], reward_components=one) for n, one in enumerate(parts)]
        groups.append(own)
    values = measured(groups, rewards) | chosen_by("judge", groups, rewards)
    assert is_share("right/best@2", values) and not is_share("judge/best@2", values)
    assert not is_share("right/best@2") and not is_share("right", values) and is_share("right/pass@2")
    found = mean_interval(values["right/best@2"], shares=is_share("right/best@2", values))
    assert found.mean < 1.0 and found.high == 1.0 and mean_interval(values["right/best@2"]).high > 1.0


def test_what_is_picked_counts_where_a_reward_is_for_the_prompt() -> None:
    rewards = [Reward("odd", 1.0, lambda t, _: [], where={"odd": True}), Reward("judge", 0.0, lambda t, _: [])]
    groups = []
    for place in range(4):
        parts = [{"odd": float(place % 2 and n == 0), "judge": float(n == 0)} for n in range(2)]
        example = Example(f"a/{place}", "?", meta={"odd": bool(place % 2)})
        groups.append([Episode(example, place, n, [Turn([1], [2])], reward_components=own)
                       for n, own in enumerate(parts)])  # fmt: skip
    found = measured(groups, rewards) | chosen_by("judge", groups, rewards)
    assert found["odd"] == [[], [1.0, 0.0]] * 2
    assert found["odd/best@2"] == found["odd/pass@2"] == [[], [1.0]] * 2 and found["judge/best@2"] == [[1.0]] * 4


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
