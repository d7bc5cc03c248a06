"""Tasksets of verifiers 0.4.0. Without that library (it is not in the extra `dev`) the tests that play are skipped."""

import importlib.metadata
import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Branch, Step
from lmgym.envs.check import check_env
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.envs.verifiers import Verifiers
from lmgym.types import Example
from tests import runs
from tests.parity.test_resume import Interrupting

SUMS, GUESSES, TOOLS = "verifiers_sums", "verifiers_guesses", "verifiers_tools"
GAME = Example("game/3", "a game")
ANSWERED = {"role": "assistant", "content": ""}
OPENING = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3="}]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(LmgymError, match=r"pip install 'lmgym\[verifiers\]'"):
        Verifiers(taskset="any").reset(GAME, 0)


def test_another_version_of_the_library_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.1")
    with pytest.raises(LmgymError, match=r"works with verifiers 0\.4, and 0\.5\.1 is installed"):
        Verifiers(taskset=SUMS, rows=[0, 1]).reset(GAME, 0)


@pytest.mark.parametrize("rows", [[3], [5, 5], [-1, 4], [4, 2]])
def test_rows_are_a_range(rows: list[int]) -> None:
    with pytest.raises(LmgymError, match="0 <= begin < end"):
        Verifiers(taskset="any", rows=rows)


@pytest.mark.parametrize(("text", "reward"), [("6", 2.5), ("7", 0.5), ("seven", 0.0)])
def test_one_turn_earns_the_weighted_rewards(library: Any, text: str, reward: float) -> None:
    env = Verifiers(taskset=SUMS)
    assert env.reset(GAME, 0) == OPENING
    step = env.step(text, "eos")
    assert step.terminated and step.reward == reward
    assert step.info == {"right": float(text == "6"), "short": float(len(text) < 4), "length": len(text)}


def test_rows_choose_the_tasks(library: Any) -> None:
    env = Verifiers(taskset=SUMS, rows=[4, 6])
    prompts = [env.reset(Example(f"episodes/train/{n}", ""), 0)[-1]["content"] for n in range(3)]
    assert prompts == ["4+4=", "5+5=", "4+4="]
    assert env.reset(Example("a", "", meta={"row": 5}), 0)[-1]["content"] == "5+5="
    env.close()


@pytest.mark.parametrize("example", [Example("a", "", meta={"row": 6}), Example("a", "", meta={"row": "5"})])
def test_a_row_outside_is_named(library: Any, example: Example) -> None:
    with pytest.raises(LmgymError, match=r"meta\['row'\] is .*; env verifiers plays rows 4 to 5"):
        Verifiers(taskset=SUMS, rows=[4, 6]).reset(example, 0)


def test_several_turns_with_a_secret_from_the_seed(library: Any) -> None:
    env, outside = Verifiers(taskset=GUESSES, rows=[0, 4]), random.getstate()
    assert env.reset(GAME, seed=5) == [{"role": "user", "content": "Guess a number from 0 to 9."}]
    secret = random.Random(5).randint(0, 9)
    first, second = env.step(str(secret - 1), "eos"), env.step("", "eos")
    assert first.messages[-1] == {"role": "user", "content": "higher"}
    assert second.messages == [*first.messages, ANSWERED, {"role": "user", "content": "lower"}]
    assert (first.branch, second.branch) == (Branch(turn=0, covered=2), Branch(turn=1, covered=4))
    over = env.step(str(secret), "eos")
    assert over.terminated and over.reward == 1.0 + 0.5 / 3 and over.info == {"won": 1.0, "brief": 1 / 3, "turns": 3.0}
    assert random.getstate() == outside


@pytest.mark.parametrize(("stop", "most"), [("eos", 1), ("context", None)])
def test_a_cut_episode_is_scored(library: Any, stop: str, most: int | None) -> None:
    env = Verifiers(taskset=GUESSES, rows=[0, 4], max_turns=most)
    env.reset(GAME, 0)
    step = env.step("no", stop)
    assert step.truncated and step.reward == 0.5 / 3 and step.info == {"won": 0.0, "brief": 1 / 3, "turns": 1.0}


def test_a_condition_of_the_task_ends_the_episode(library: Any) -> None:
    env = Verifiers(taskset=GUESSES, rows=[0, 4])
    env.reset(GAME, 0)
    step = env.step("stop", "eos")
    assert step.terminated and step.reward == 0.5 / 5 and step.info["turns"] == 1.0


def test_a_limit_of_turns_of_the_environment_holds(library: Any) -> None:
    env = Verifiers(taskset=GUESSES, rows=[0, 4], environment_config={"highest": 0})
    env.reset(GAME, 0)
    steps = [env.step("no", "eos") for _ in range(9)]
    assert steps[-1].truncated and not any(step.over for step in steps[:-1])


@pytest.mark.parametrize(
    ("taskset", "text", "sentence"),
    [
        (SUMS, "raise", "no such answer"),
        (GUESSES, "program", "gives it no machine"),
        (GUESSES, "machine", "gives it no machine"),
    ],
)
def test_what_fails_costs_the_episode(library: Any, taskset: str, text: str, sentence: str) -> None:
    envs = InProcess(lambda: Verifiers(taskset=taskset, rows=[0, 4]))
    envs.begin([(0, GAME, 0)])
    (failure,) = envs.step([(0, text, "eos")])
    assert isinstance(failure, EnvFailure) and sentence in failure.message
    envs.close()


def test_another_past_is_a_branch(library: Any) -> None:
    """A second conversation trains as well as the first; how both would be paid is not known, so the episode fails."""
    envs = InProcess(lambda: Verifiers(taskset=GUESSES, rows=[0, 4]))
    envs.begin([(0, GAME, 0)])
    [second] = envs.step([(0, "again", "eos")])
    assert isinstance(second, Step) and second.branch == Branch() and second.info == {"forks": 1.0}
    envs.step([(0, "x", "eos")])
    [failure] = envs.step([(0, "stop", "eos")])
    assert isinstance(failure, EnvFailure) and "the episode has 2 conversations; lmgym trains one" in failure.message
    envs.close()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"taskset": "no_such_taskset"}, "cannot be loaded: Python finds no module 'no_such_taskset'"),
        ({"taskset": "json"}, "'json' cannot be loaded: .*exports no Taskset"),
        ({"taskset": SUMS, "config": {"levl": 1}}, r"unknown key 'env\.config\.levl' .*did you mean 'level'"),
        ({"taskset": SUMS, "config": {"level": "high"}}, r"key 'env\.config\.level' of .*integer"),
        ({"taskset": SUMS, "environment_config": {"levl": 1}}, r"key 'env\.environment_config\.levl'"),
        ({"taskset": SUMS, "environment_config": {"agent": {}}}, r"'env\.environment_config\.agent' is set by env"),
        ({"taskset": SUMS, "rows": [0, 11]}, "has only 10 tasks"),
        ({"taskset": SUMS, "rows": [20, 21]}, "has only 10 tasks"),
        ({"taskset": SUMS, "environment": "user_sim"}, "it has 2 agents"),
        ({"taskset": SUMS, "config": {"needs": "image"}}, "its tasks need a container"),
        ({"taskset": TOOLS}, "its tasks need tools"),
        ({"taskset": "verifiers_harness"}, "it brings a program for the agent"),
        ({"taskset": SUMS, "config": {"id": SUMS}}, "key 'env.config.id' is 'env.taskset'"),
        ({"taskset": GUESSES}, "'env.rows' is missing"),
    ],
)
def test_mistakes_are_named(library: Any, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        Verifiers(**keys).reset(GAME, 0)


def test_more_episodes_than_open_files_are_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (128 + 2 * 3,) * 2)
    envs = InProcess(lambda: Verifiers(taskset=GUESSES, rows=[0, 4]))
    envs.begin([(0, GAME, 0), (1, GAME, 1)])
    with pytest.raises(LmgymError, match=r"can play 2 episodes at a time .* lower engine\.rows"):
        envs.begin([(2, GAME, 2)])
    envs.end([0])
    envs.begin([(3, GAME, 3)])
    envs.close()


def test_it_keeps_the_contract(library: Any) -> None:
    example = Example("episodes/test/0", "")
    check_env("verifiers", example, ["3", "", "\u0661", "<think>5</think> 4"], taskset=GUESSES, rows=[0, 4])


@pytest.mark.processes
@pytest.mark.slow
def test_an_episode_that_hangs_is_ended_by_the_limit_of_its_process(library: Any) -> None:
    envs = EnvProcesses("verifiers", {"taskset": GUESSES, "rows": [0, 4]}, count=1)
    envs.begin([(0, GAME, 0), (1, GAME, 1)])
    envs.seconds = 10.0  # enough to import verifiers once more, for the other episode
    hangs, goes_on = envs.step([(0, "hang", "eos"), (1, "no", "eos")])
    assert isinstance(hangs, EnvFailure) and hangs.message == "the environment did not answer within 10 s"
    assert goes_on.messages[-1] == {"role": "user", "content": "lower"}
    envs.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_recipe_trains_and_resumes_bit_for_bit(library: Any, tmp_path: Path) -> None:
    """In worker processes, in this one, and stopped and resumed: the same files. Evaluations play other rows."""
    env = {"name": "verifiers", "taskset": GUESSES, "rows": [0, 8], "max_turns": 3, "workers": 1}
    changes: dict[str, Any] = {
        "env": env,
        "task": None,
        "rewards": {},
        "evaluation": {"every": 2, "examples": 4, "env": {**env, "taskset": SUMS, "rows": [6, 10], "workers": 0}},
        "steps": 4,
        "checkpoint": {"every": 1},
    }
    whole = runs.run(tmp_path / "whole", **changes)
    changes["env"] = {**env, "workers": 0}
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), **changes)
    runs.run(halves, **changes)
    runs.assert_equal_runs(whole, halves, but=("fingerprint.json", "manifest.json"))  # these have the workers
    records = runs.records(whole / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert any(step["gradient_norm"] > 0 for step in steps)
    assert all(0 < step["environment/brief"] <= 1 and 1 <= step["environment/turns"] <= 3 for step in steps)
    assert any("environment/short" in record for record in records if record["kind"] == "evaluation")
    (first, *_) = runs.records(whole / "rollouts.jsonl")
    assert first["turns"][-1]["info"].keys() == {"won", "brief", "turns"} or "short" in first["turns"][-1]["info"]
