"""The leave-one-out baseline with the deviation of the others, against NeMo-RL's definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.algorithms.grpo.credit import LeaveOneOut
from lmgym.batch import collate
from lmgym.functional.group_advantages import deviation_of_others
from lmgym.types import Episode, Example, Turn


def advantages(scores: list[list[float]], scale: str) -> list[float]:
    episodes = []
    for group, own in enumerate(scores):
        for score in own:
            episodes.append(Episode(Example("x", "?"), group, len(episodes), [Turn([1], [2])], score=score))
    batch = collate(episodes)
    part = LeaveOneOut(scale=scale)  # type: ignore[arg-type]
    return part.advantages(batch, batch.score.double())[batch.actions].tolist()


def test_by_hand() -> None:
    # Group 3, 0, 2: the others of 3 are 0 and 2, of mean 1 and deviation sqrt(2).
    assert advantages([[3.0, 0.0, 2.0]], "none") == pytest.approx([2.0, -2.5, 0.5])
    by_hand = [2 / math.sqrt(2), -2.5 / math.sqrt(0.5), 0.5 / math.sqrt(4.5)]
    assert advantages([[3.0, 0.0, 2.0]], "others") == pytest.approx(by_hand, rel=1e-5)


def test_one_against_equals_keeps_its_own_size() -> None:
    """The others of the odd one are equal: a rounding error for a deviation would make its advantage thousands."""
    [*many, odd] = advantages([[0.35] * 7 + [0.0]], "others")
    assert odd == pytest.approx(-0.35)
    assert many == pytest.approx([0.05 / (0.35 / math.sqrt(7))] * 7, rel=1e-4)


def test_groups_of_two_and_one() -> None:
    assert advantages([[1.0, 0.0], [5.0]], "others") == pytest.approx([1.0, -1.0, 0.0])


@given(st.lists(st.integers(0, 5), min_size=3, max_size=9))
def test_deviation_is_that_of_the_others(scores: list[int]) -> None:
    size = len(scores)
    score = torch.tensor(scores, dtype=torch.float64)
    found = deviation_of_others(score, torch.arange(size), torch.zeros(size, dtype=torch.long))
    for place, own in enumerate(found.tolist()):
        others = torch.tensor(scores[:place] + scores[place + 1 :], dtype=torch.float64)
        assert own == pytest.approx(float(others.std()) + 1e-6 if len(set(others.tolist())) > 1 else 1.0)
