"""The option `normalise`: running mean and deviation of a reward, in training alone, and through a resume."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.rewards.building import build_rewards
from lmgym.rewards.normalisation import Moments, normalise
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.parity.test_resume import Interrupting

numbers = st.lists(st.integers(-100, 100).map(float), max_size=6)


def answered(*texts: str) -> list[Episode]:
    return [Episode(Example("a/0", "?"), 0, n, [Turn([1], [3], text=text)]) for n, text in enumerate(texts)]


@given(st.lists(numbers, max_size=5))
def test_the_estimate_is_that_of_all_values_at_once(batches: list[list[float]]) -> None:
    moments, values = Moments(), [value for batch in batches for value in batch]
    for batch in batches:
        moments.add(batch)
    assert moments.count == len(values)
    if values:
        assert moments.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    expected = statistics.stdev(values) if len(values) > 1 else 1.0
    assert moments.deviation == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", [True, "scale"])
def test_values_are_relative_to_all_that_came_so_far(kind: Any) -> None:
    """TRL 0.11: the running estimate takes in the batch, then scores are (score - mean) / std, or score / std."""
    section = {"length": {"unit": "characters", "target": 4, "weight": 0.5, "normalise": kind}, "words": 1.0}
    rewards, moments = build_rewards(section), dict[str, Moments]()
    earlier: list[float] = []
    for texts in (("a", "abcd"), ("ab", "abc", "abcdefgh")):
        episodes = answered(*texts)
        apply_rewards(episodes, rewards)
        raw = [one.reward_components["length"] for one in episodes]
        normalise(episodes, rewards, moments)
        earlier += raw
        centre = statistics.fmean(earlier) if kind is True else 0.0
        for one, value in zip(episodes, raw, strict=True):
            expected = (value - centre) / (statistics.stdev(earlier) + 1e-8)
            assert one.reward_components["length"] == pytest.approx(expected)
            assert one.reward_components["length/raw"] == value and "words/raw" not in one.reward_components
            assert one.score == pytest.approx(0.5 * expected + 1.0)
            assert one.score == math.fsum(turn.reward for turn in one.turns)
    before = {name: vars(known).copy() for name, known in moments.items()}
    normalise(episodes, rewards, moments, learn=False)
    assert {name: vars(known) for name, known in moments.items()} == before


@pytest.mark.parametrize("value", [0.0, 0.5, -0.1 * 3, 1e6 / 7])
@pytest.mark.parametrize("kind", [True, "scale"])
def test_equal_values_are_not_divided_by_nothing(kind: Any, value: float) -> None:
    """While all are equal but for rounding, the deviation counts as 1; then it is that of all values."""
    [reward], moments = build_rewards({"words": {"normalise": kind}}), dict[str, Moments]()
    for _ in range(3):
        episodes = answered(*"abcdefg")
        for one in episodes:
            one.reward_components["words"] = one.turns[-1].reward = value
        normalise(episodes, [reward], moments)
        for one in episodes:
            assert one.reward_components["words"] == pytest.approx(0.0 if kind is True else value, abs=1e-9)
    episodes[0].reward_components["words"] = value + 1
    normalise(episodes[:1], [reward], moments)
    assert moments["words"].deviation > 0.1
    centre = moments["words"].mean if kind is True else 0.0
    expected = (value + 1 - centre) / (moments["words"].deviation + 1e-8)
    assert episodes[0].reward_components["words"] == pytest.approx(expected)


def test_it_is_for_whole_answers() -> None:
    for other in ("shaping", "each_turn"):
        with pytest.raises(LmgymError, match="normalise' is for a reward of whole answers"):
            build_rewards({"words": {"normalise": True, other: True}})
    with pytest.raises(LmgymError, match=r"words.normalise': .*'scale'"):
        build_rewards({"words": {"normalise": "std"}})


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_estimate(tmp_path: Path) -> None:
    rewards = {"length": {"unit": "characters", "target": 6, "normalise": True}}
    whole = runs.run(tmp_path / "whole", rewards=rewards, steps=4)
    cut = runs.run(tmp_path / "cut", Interrupting(at=2), rewards=rewards, steps=4)
    runs.run(cut, rewards=rewards, steps=4)
    runs.assert_equal_runs(whole, cut)
