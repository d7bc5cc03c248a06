"""Moving champions: who takes over, what a reward is shown, and that a checkpoint holds them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.rewards import champions as module
from lmgym.rewards.base import Reward, call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.champions import Champions, crown, keeps_champion, restore, with_champions
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example
from tests import runs
from tests.contract.test_group_rewards import answers
from tests.parity.test_resume import Interrupting

HERE = "tests.contract.group_rewards:beats_champion"
RECIPE: dict[str, Any] = {"rewards": {"best": {"reward": HERE, "normalise": True}, "regex": {"pattern": "[0-9]"}}}
FEW = RECIPE | {"task": {**runs.TINY["task"], "size": 8}, "sampling": {"max_new_tokens": 8}}  # prompts, 4 in each step


def reward(**options: Any) -> Reward:
    return build_rewards({HERE: {"pool": False, **options}})[0]


def judged(scored: list[Episode], known: dict[str, Champions], own: Reward) -> list[Any]:
    """A draw: answers are judged with the champions as they are, and the best take over."""
    own = with_champions([own], known, [one.example for one in scored])[0]
    apply_rewards(scored, [own])
    crown(scored, [own], known)
    return [one.reward_components[own.name] for one in scored]


def test_the_best_so_far_stays_until_it_is_beaten() -> None:
    known = {HERE: Champions()}
    assert judged(answers("1 22 x 33", "a b"), known, reward()) == [0.0, 1.0, 0.0, 1.0, 0.5, 0.5]
    assert known[HERE].seats == {"a/0": "22"}  # of two equally good ones the first; nobody stands out in the other
    assert judged(answers("44 5", "7 b"), known, reward()) == [0.5, 0.0, 1.0, 0.0]
    assert known[HERE].seats == {"a/0": "22", "a/1": "7"}  # a tie keeps the old champion
    assert judged(answers("444 5555", "a b"), known, reward()) == [1.0, 1.0, 0.0, 0.0]
    assert known[HERE].seats == {"a/1": "7", "a/0": "444"}  # both beat it: the first


def test_a_reward_sees_the_champion_and_the_answers_that_train_do_not() -> None:
    known = {HERE: Champions({"a/0": "<think>9</think>1"})}
    scored = answers("<think>123</think>4 <think>5</think>666")
    assert judged(scored, known, reward(strip_thinking=True)) == [0.0, 1.0]  # 2 digits: the seat is shown as it is
    assert known[HERE].seats == {"a/0": "666"}  # what the reward was shown
    assert all("champion" not in one.example.meta and "think" in one.text for one in scored)
    fixed = reward(moving=False)
    assert not keeps_champion(fixed) and keeps_champion(reward())
    assert call_reward(fixed, answers("1 x")) == [1.0, 0.0]
    assert with_champions([fixed], {}, [])[0] is fixed


def test_what_was_not_judged_takes_no_seat_and_seats_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known, scored = {HERE: Champions()}, answers("1 2")
    apply_rewards(scored, [reward()])
    scored[0].reward_components[HERE], scored[1].error = None, "it ended"
    scored[1].reward_components[HERE] = 1.0
    crown(scored, [reward()], known)
    assert known[HERE].seats == {}
    monkeypatch.setattr(module, "MOST", 2)
    own = Champions({"a": "1", "b": "2"})
    own.crown([("c", "3", 0.75), ("a", "4", 0.5)])
    assert own.seats == {"b": "2", "c": "3"}  # who has been champion for longest gives way
    restore(known, {HERE: {"a/0": "text"}, "gone": {}})
    assert known[HERE].seats == {"a/0": "text"}
    for wrong in ({HERE: {"a": 1}}, {HERE: ["a"]}):
        with pytest.raises(ValueError, match="has something else"):
            restore(known, wrong)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_champions(tmp_path: Path) -> None:
    """Every second step asks the same prompts as the one before; the third step's checkpoint holds other champions than
    the last one's, so a run that lost them, or kept the newest, would earn other rewards."""
    whole = runs.run(tmp_path / "whole", **FEW)
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **FEW)
    early = json.loads((runs.newest(halves) / "champions.json").read_text())
    runs.run(halves, **FEW)
    runs.assert_equal_runs(whole, halves)
    late = json.loads((runs.newest(whole) / "champions.json").read_text())
    assert early["best"] and late["best"] and early != late
    assert any(late["best"].get(prompt) != text for prompt, text in early["best"].items())


def test_it_does_not_go_with_answers_that_are_judged_ahead(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"reward 'best' compares with a champion .*; write engine\.ahead: 0"):
        algorithm = {"name": "grpo", "group_size": 4, "correction": "truncated"}
        runs.run(tmp_path / "run", **RECIPE, algorithm=algorithm, engine={"ahead": 1})


def test_the_first_champion() -> None:
    of = module.champion_of
    assert of(Example("a", "?")) is None and of(Example("a", "?", ("r", "s"))) == "r"
    assert of(Example("a", "?", ("r",), {"champion": "c"})) == "c"
    with pytest.raises(LmgymError, match="column 'champion' of example 'a' holds no text"):
        of(Example("a", "?", (), {"champion": 3}))
