"""A class in the form of RAGEN's and the old gym's as an environment: several actions an answer, by words."""

from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.check import check_env
from lmgym.envs.text_game import TextGame
from lmgym.types import Example
from tests import runs

GAMES = "tests.contract.text_games"
WORDS = {"Left": 1, "Right": 2}
GAME = Example("game/0", "a game")


def lane(**changes: Any) -> TextGame:
    keys = {"environment": f"{GAMES}:Lane", "actions": WORDS, "answer": "<answer>(.*?)</answer>"}
    return TextGame(**keys | changes)


def test_several_actions_of_an_answer() -> None:
    env = lane()
    [message] = env.reset(GAME, seed=3)
    start = message["content"].index("P") - len("level 0: ")
    step = env.step("<think>two</think><answer>right || RIGHT</answer>", "eos")
    assert step.messages[0]["content"].index("P") - len("level 0: ") == start + 2
    assert step.reward == pytest.approx(-0.2) and step.info == {"invalid": 0.0, "actions": 2.0, "success": 0.0}
    rest = 5 - start - 2
    over = env.step(f"<answer>{'||'.join(['Right'] * 5)}</answer>", "eos")
    assert over.terminated and over.reward == pytest.approx(1.0 - 0.1 * (rest - 1))
    assert over.info["actions"] == rest and over.info["success"] == 1.0


@pytest.mark.parametrize("text", ["right", "<answer>jump</answer>", "<answer></answer>", ""])
def test_an_answer_without_an_action(text: str) -> None:
    env = lane(invalid_penalty=0.5)
    [first] = env.reset(GAME, seed=0)
    step = env.step(text, "eos")
    assert step.reward == -0.5 and step.info["invalid"] == 1.0 and not step.over
    assert step.messages[0]["content"] == f"That holds no action. {first['content']}"


def test_actions_behind_one_that_is_none_are_not_taken() -> None:
    env = lane(max_actions=3)
    env.reset(GAME, seed=0)
    assert env.step("<answer>right||jump||right</answer>", "eos").info["actions"] == 1
    assert env.step("<answer>left||right||left||right</answer>", "eos").info["actions"] == 3


def test_rows_seeds_and_memory() -> None:
    env = lane(reset_arguments={"level": "{depth}"}, memory="observation", system_prompt="Walk.", max_turns=2)
    messages = env.reset(Example("a/0", "?", meta={"depth": 7}), seed=0)
    assert messages[0]["content"] == "Walk." and messages[1]["content"].startswith("level 7")
    step = env.step("<answer>right</answer>", "eos")
    assert step.restart and [one["role"] for one in step.messages] == ["system", "user"]
    assert env.step("<answer>left</answer>", "eos").truncated
    starts = {lane().reset(GAME, seed=seed)[0]["content"] for seed in range(20)}
    assert len(starts) == 2 and lane().reset(GAME, seed=5) == lane().reset(GAME, seed=5)


def test_gymnasiums_values_and_texts_as_actions() -> None:
    env = TextGame(environment=f"{GAMES}:Modern", separator="")
    env.reset(GAME, seed=0)
    assert env.step("go || on", "eos").messages[0]["content"] == "took go || on"
    assert env.step("stop", "eos").truncated


def test_numbers_of_numpy_are_noted() -> None:
    env = TextGame(environment=f"{GAMES}:Arrays")
    env.reset(GAME, seed=0)
    step = env.step("go", "eos")
    assert step.info == {"invalid": 0.0, "actions": 1.0, "place": 3.0, "share": 0.5, "success": 1.0}
    assert step.reward == 0.5 and not step.over


def test_it_keeps_the_contract() -> None:
    check_env("text_game", environment=f"{GAMES}:Lane", actions=WORDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": f"{GAMES}:Nothing"}, "has no 'Nothing'"),
        ({"environment": "json:dumps"}, "has no method reset"),
        ({"answer": "("}, "is no regular expression"),
        ({"answer": "x"}, "has 0 groups; it needs one"),
        ({"actions": {"h": 1, "Left": 2, "H": 3}}, "'h' and 'H' differ in upper and lower case alone"),
        ({"actions": {"up||up": 1}}, r"no answer can mean 'up\|\|up'; .* does not hold the separator \('\|\|'"),
        ({"actions": {"": 1}}, "no answer can mean ''"),
        ({"actions": {" up": 1}}, "no answer can mean ' up'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        lane(**changes)


def test_a_step_of_another_form() -> None:
    env = lane(environment=f"{GAMES}:Wrong")
    env.reset(GAME, seed=0)
    with pytest.raises(TypeError, match="it must return text, reward, done and info"):
        env.step("<answer>right</answer>", "eos")


def test_a_run(tmp_path: Path) -> None:
    env = {"name": "text_game", "environment": f"{GAMES}:Lane", "max_turns": 2, "actions": WORDS}
    runs.run(tmp_path / "run", env=env, rewards=None, task="episodes", steps=1)
    [record] = [one for one in runs.records(tmp_path / "run/metrics.jsonl") if one["kind"] == "train"]
    assert record["environment/invalid"] == 1.0 and record["turns/mean"] == 2.0
