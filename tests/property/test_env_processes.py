"""Environments in processes: whatever one of them does, it costs its own episode, in time, and no process is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import EnvFailure, Opening
from lmgym.types import Example
from tests.property.test_workers import gone

HERE = "tests.property.odd_environments"
FAILING = {
    "hang": "the environment did not answer within 1 s",
    "hang together": "the environment did not answer within 1 s",
    "hang detached": "the environment did not answer within 1 s",
    "hang elsewhere": "the environment did not answer within 1 s",
    "loop": "the environment did not answer within 1 s",
    "stop": "the environment did not answer within 1 s",
    "crash": "the environment's process was killed by SIGSEGV",
    "exit": "the environment's process ended with status 0",
    "supervisor stopped": "the environment did not answer within 1 s",
    "sys.exit": "SystemExit: 3 (at ",
    "killed": "the environment's process was killed by SIGKILL",
    "supervisor killed": "the environment's worker ended with status -9",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that is stopped is waited for this long beyond the limit of its call."""
    monkeypatch.setattr("lmgym.processes.pool.GRACE", 2.0)


def odd() -> EnvProcesses:
    return EnvProcesses("odd", plugins=[HERE], count=1, seconds=1.0)


def answer(envs: EnvProcesses, index: int, call: str, how: str) -> object:
    """What the environment answers in the call in which it fails, if it fails."""
    opening = envs.begin([(index, Example(call, how), 0)])[0]
    return opening if isinstance(opening, EnvFailure) else envs.step([(index, "", "eos")])[0]


@pytest.mark.parametrize("call", ["reset", "step"])
def test_the_last_environment_of_a_process_costs_its_own_episode(call: str) -> None:
    envs = odd()
    for index, (how, message) in enumerate(FAILING.items()):
        failure = answer(envs, index, call, how)
        assert isinstance(failure, EnvFailure) and failure.message.startswith(message), (how, failure)
        envs.end([index])
        fine = answer(envs, 100, call, "fine")
        assert not isinstance(fine, EnvFailure), f"after '{how}': {fine}"
        envs.end([100])
    envs.close()


def test_the_time_limit_holds_from_the_first_call_on() -> None:
    """Starting the process is not part of it, so what is left of that time is not given to the call."""
    envs = odd()
    began = time.monotonic()
    assert answer(envs, 0, "reset", "hang") == EnvFailure(FAILING["hang"])
    assert time.monotonic() - began < 30.0  # a busy machine takes its time to start a process
    envs.close()


def test_what_an_environment_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also a process in a session of its own, whose parent is gone."""
    note = tmp_path / "note"
    envs = odd()
    failure = envs.begin([(0, Example("reset", "hang detached", meta={"note": str(note)}), 0)])[0]
    assert isinstance(failure, EnvFailure)
    _, _, started = map(int, note.read_text().split())
    assert gone(started)
    envs.close()


def test_one_of_many_that_fails_in_one_request_costs_the_others_nothing() -> None:
    envs = odd()
    hows = ["fine", "hang", "fine", "crash", "supervisor killed", "exit", "fine", "hang elsewhere"]
    hows += ["supervisor stopped", "fine"]
    opened = envs.begin([(index, Example("step", how), 0) for index, how in enumerate(hows)])
    assert opened == [Opening("go")] * len(hows)
    for how, step in zip(hows, envs.step([(index, "", "eos") for index in range(len(hows))]), strict=True):
        assert step == (EnvFailure(FAILING[how]) if how in FAILING else Step([], terminated=True, reward=1.0))
    envs.close()


def test_the_answer_of_a_fork_is_not_taken_for_another_one() -> None:
    envs = odd()
    envs.begin([(0, Example("step", "fork"), 0)])
    assert envs.step([(0, "", "eos")]) == [Step([], terminated=True, reward=1.0)]
    time.sleep(0.4)
    assert envs.begin([(1, Example("step", "fine"), 0)]) == [Opening("go")]  # and not the Step of the fork
    envs.close()


def test_an_environment_that_cannot_be_imported_is_named() -> None:
    envs = EnvProcesses("no_such_environment", count=1)
    with pytest.raises(LmgymError, match=r"unknown env.*'no_such_environment'"):
        envs.begin([(0, Example("x", "?"), 0)])
    envs.close()


OWNER = """
import sys
from lmgym.envs.env_processes import EnvProcesses
from lmgym.types import Example
envs = EnvProcesses("odd", plugins=[sys.argv[1]], count=1, seconds=1000.0)
print(envs.begin([(0, Example(sys.argv[2], sys.argv[3], meta={"note": sys.argv[4]}), 0)]), flush=True)
"""


@pytest.mark.parametrize("how", ["hang", "hang together", "hang detached", "hang elsewhere", "loop"])
def test_a_process_ends_with_its_killed_owner_in_the_middle_of_a_call(how: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, HERE, "reset", how, str(note)], cwd=os.getcwd())
    for _ in range(600):
        if note.exists() and note.read_text():
            break
        time.sleep(0.1)
    owner.kill()
    owner.wait()
    assert gone(*(int(number) for number in note.read_text().split()))
