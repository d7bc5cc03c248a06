"""`kill -9` at twenty moments, saving included: nothing is lost but the step in flight, and the end is the same."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmgym.logs.console import Console
from lmgym.training.checkpoints import checkpoint
from lmgym.training.run import Stoppable, stop_signals
from tests import runs
from tests.contract.test_agent_program import TRAINING as PROGRAMS
from tests.runs import Shell, assert_equal_runs

KILLS = 20
RECIPE: dict[str, Any] = {
    # A warm stage so short that the kills reach the second one on a slow machine too.
    "stages": [{"name": "warm", "algorithm": "supervised", "steps": 12}, {"name": "rl", "steps": 70}],
    "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1, "epochs": 2},
    "evaluation": {"every": 4, "examples": 8, "keep_best": "reward", "final_split": "validation"},
    "checkpoint": {"every": 1, "keep": 1},
}


def train_steps(folder: Path) -> list[tuple[int, int]]:
    """(stage, step) of each whole train record; a kill may have torn the last line."""
    path = folder / "metrics.jsonl"
    if not path.is_file():  # killed before the run folder was made
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    whole = folder / "whole.jsonl"
    whole.write_bytes(b"".join(line for line in lines if line.endswith(b"\n")))
    steps = [(record["stage"], record["step"]) for record in runs.records(whole) if record["kind"] == "train"]
    whole.unlink()
    return steps


def saving(folder: Path) -> bool:
    return any(folder.glob(".saving-*")) or any(folder.glob("checkpoints/.saving-*"))


def wait_for(moment: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < end, "the run stands still"
        time.sleep(0.0005)


def size(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0


@pytest.mark.slow
def test_twenty_kills_lose_nothing_but_the_step_in_flight(shell: Shell, tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", **RECIPE)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert shell.run("train", recipe, f"out={whole}") == 0, shell.said
    moments = random.Random(0)
    saved = torn = 0
    for kill in range(KILLS):
        shell.start("train", recipe, f"out={killed}")
        if kill % 4 == 0:  # anywhere: while it loads, samples, trains, evaluates
            time.sleep(moments.uniform(0.0, 0.8))
        else:  # after some records, in the middle of saving
            for _ in range(moments.randint(1, 4)):
                before = size(killed)
                wait_for(lambda before=before: size(killed) > before)
            wait_for(lambda: saving(killed))
            time.sleep(moments.uniform(0.0, 0.006))
        os.kill(shell.process, signal.SIGKILL)
        assert shell.wait() == -signal.SIGKILL, f"kill {kill} came too late: {shell.said}"
        torn += saving(killed)
        steps = train_steps(killed)
        assert steps == [(stage, step) for stage, count in ((0, 12), (1, 70)) for step in range(count)][: len(steps)]
        latest, complaints = checkpoint.newest(killed / "checkpoints")
        version = checkpoint.read_state(latest)["version"] if latest else 0
        assert not complaints
        assert len(steps) - 1 <= version <= len(steps)  # at most the step in flight is lost ...
        assert version >= saved  # ... and nothing that was there before
        saved = version
    assert torn >= 3 and steps[-1][0] == 1, "too few kills hit a save, or none the second stage"
    assert shell.run("train", recipe, f"out={killed}") == 0, shell.said
    assert_equal_runs(whole, killed)
    assert (whole / "best/model.safetensors").read_bytes() == (killed / "best/model.safetensors").read_bytes()
    assert not saving(killed)


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(shell: Shell, tmp_path: Path) -> None:
    """The real signals, one after the other in one run; then the command that it names, until the end. A lost terminal
    sends SIGHUP, sometimes twice."""
    recipe = runs.write(tmp_path / "recipe.yaml", **RECIPE | {"checkpoint": {"every": 0}})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert shell.run("train", recipe, f"out={whole}") == 0, shell.said
    for numbers in ((signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP, signal.SIGHUP)):
        shell.start("train", recipe, f"out={stopped}")
        before = size(stopped)
        wait_for(lambda before=before: size(stopped) > before + 1500)  # soon: the whole run takes seconds
        for number in numbers:
            os.kill(shell.process, number)
        assert shell.wait() == 130, shell.said
        assert "stopping after this step" in shell.said and f"go on with: lmgym train {stopped}" in shell.said
        assert len(train_steps(stopped)) == runs.state(stopped)["version"]
        assert not (stopped / "final").exists()
    assert shell.run("train", stopped) == 0, shell.said
    assert f"resuming {stopped}" in shell.said
    assert_equal_runs(whole, stopped)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(shell: Shell, tmp_path: Path) -> None:
    """In the middle of a reward that takes a minute: the first one is noted, the second one ends it."""
    rewards = {"tests.contract.test_bad_input:sleeps": 1.0}
    recipe = runs.write(tmp_path / "recipe.yaml", rewards=rewards)
    shell.start("train", recipe, f"out={tmp_path / 'run'}")
    wait_for(lambda: "stage 1/1" in shell.said)
    time.sleep(0.3)
    os.kill(shell.process, signal.SIGINT)
    wait_for(lambda: "stopping after this step; once more to stop at once" in shell.said)
    time.sleep(0.3)  # until the process sleeps again: Python's own sleep misses a signal that comes just before it
    os.kill(shell.process, signal.SIGINT)
    assert shell.wait() == 130, shell.said
    assert "lmgym: stopped; what was saved is whole" in shell.said and "Traceback" not in shell.said


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager of jobs signals all processes: a run gets its signal, and what a sweep or torchrun passes on."""

    @dataclass
    class Stopping:
        console: Console
        asked_to_stop: bool = False

    run: Stoppable = Stopping(Console(quiet=True))
    monkeypatch.setattr("lmgym.training.run.AS_ONE", 3600.0)
    with stop_signals(run):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert run.asked_to_stop
        monkeypatch.setattr("lmgym.training.run.AS_ONE", 0.0)
        signal.raise_signal(signal.SIGHUP)  # the kernel and the shell may both send it
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_killed_run_whose_episodes_are_programs_ends_the_same(shell: Shell, tmp_path: Path) -> None:
    """The gateway dies with the run, and its programs with the gateway (tests/torture/kills.py: at random moments)."""
    recipe = runs.write(tmp_path / "recipe.yaml", **PROGRAMS)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert shell.run("train", recipe, f"out={whole}") == 0, shell.said
    shell.start("train", recipe, f"out={killed}")
    wait_for(lambda: train_steps(killed))
    os.kill(shell.process, signal.SIGKILL)
    assert shell.wait() == -signal.SIGKILL
    assert shell.run("train", recipe, f"out={killed}") == 0, shell.said
    assert_equal_runs(whole, killed)
