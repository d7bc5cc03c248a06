"""Rewards that see all answers to a prompt at once (`@of_groups`)."""

from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward, call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests import runs

HERE = "tests.contract.group_rewards"


def answers(*groups: str) -> list[Episode]:
    """An episode for each word of each text, a group for each text."""
    pairs = [(group, word) for group, text in enumerate(groups) for word in text.split()]
    return [
        Episode(Example(f"a/{group}", "?"), group, index, [Turn([1], [2], text=word)])
        for index, (group, word) in enumerate(pairs)
    ]


def reward(name: str, **options: Any) -> Reward:
    return build_rewards({f"{HERE}:{name}": options})[0]


@pytest.mark.processes
@pytest.mark.parametrize("pool", [True, False])
def test_it_gets_all_answers_to_a_prompt_and_returns_a_number_each(pool: bool) -> None:
    """Whatever their order: here every second answer is of the other prompt."""
    scored = answers("a bb a", "ccc dddd eeeee")
    mixed = [scored[index] for index in (0, 3, 1, 4, 2, 5)]
    shortest = reward("shortest", prize=2.0, pool=pool)
    assert call_reward(shortest, mixed) == [2.0, 2.0, 0.0, 0.0, 2.0, 0.0]
    apply_rewards(mixed, [shortest])
    assert [one.score for one in scored] == [2.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    check_reward(f"{HERE}:shortest")


def test_a_group_that_it_fails_for_is_not_judged_and_the_others_are() -> None:
    scored = answers("a b", "c x", "d e", "f")
    apply_rewards(scored, [reward("raises_at_x", pool=False)], most_failures=2)
    assert [one.judged for one in scored] == [True, True, False, False, True, True, False]
    assert [one.score for one in scored] == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert [bool(one.reward_errors) for one in scored] == [False, False, True, True, False, False, False]
    with pytest.raises(LmgymError, match=r"raised ValueError: no score for an x .*; it failed for 2 answers"):
        apply_rewards(answers("a b", "c x"), [reward("raises_at_x", pool=False)], most_failures=1)


def test_the_majority_of_a_group_is_right() -> None:
    """Numbers are compared as numbers; finalists share; where no two agree nobody is judged."""
    groups = "7 8 7.0", "1 2 2 1 3", "4 5", "x y"
    scored = answers(*groups)
    found = call_reward(build_rewards({"majority_answer": 1.0})[0], scored)
    assert found == [1.0, 0.0, 1.0, *[1.0] * 4, 0.0, *[None] * 4]


def test_diversity_is_what_no_other_answer_says() -> None:
    """By hand: words and pairs of "a b c" (5) and "a b d" (5) have a, b and (a, b) in common: Dice 6 / 10."""
    scored = answers("a_b_c a_b_d e", "a_b a_b", "x", "- -")
    for one in scored:
        one.turns[-1].text = one.text.replace("_", " ").replace("-", "")
    found = call_reward(build_rewards({"group_diversity": 1.0})[0], scored)
    assert found == [pytest.approx(1 - 0.3), pytest.approx(1 - 0.3), 1.0, 0.0, 0.0, None, 0.0, 0.0]
    words = call_reward(build_rewards({"group_diversity": {"n": 1}})[0], scored)
    assert words[0] == pytest.approx(1 - 2 * 2 / 6 / 2)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"'too_few' is of groups, and returned lists of \[1\] numbers for .* \[2\]"):
        call_reward(reward("too_few", pool=False), answers("a b"))
    for option in ("shaping", "each_turn", "correct_is_one"):
        with pytest.raises(LmgymError, match=f"{option}': this reward compares whole answers"):
            reward("shortest", **{option: True})
    section = {f"{HERE}:shortest": 1.0}
    for algorithm, why in (
        ({"name": "grpo", "group_size": 4}, ""),
        ({"name": "reinforce", "group_size": 1}, "group_size is 1"),
        ({"name": "nash_md", "group_size": 2}, "scores an answer alone"),
    ):
        changes: dict[str, Any] = {"rewards": section, "algorithm": algorithm, "steps": 1}
        if not why:
            folder = runs.run(tmp_path / "run", **changes, logs={"rollouts": "all"}, evaluation={"samples": 2})
            records = [one for one in runs.records(folder / "rollouts.jsonl") if one["kind"] == "train"]
            groups = [[one["score"] for one in records if one["group"] == group] for group in range(4)]
            assert all(len(group) == 4 and max(group) == 1.0 for group in groups)
        else:
            with pytest.raises(LmgymError, match=f"compares the answers to a prompt with each other, and .*{why}"):
                runs.run(tmp_path / "none", **changes)
