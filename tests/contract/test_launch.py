"""`lmgym train --ranks --restarts`: torchrun starts the ranks, and a new group goes on after one has died."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmgym.distributed.launch import CRASHED, RANK_LOST, deaths, launch
from tests import runs
from tests.runs import complaint
from tests.torture.ranks import command, newest_step, ranks_of


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["WORLD_SIZE=two"], "the environment variable WORLD_SIZE is 'two'"),
        (["--restarts", "-1"], "--restarts is -1; it must be at least 0"),
        (["--ranks", "2", "runs.seeds=[0,1]"], "runs: trains several runs, each in one process"),
        (["--ranks", "2", "stepz=3"], "unknown key 'stepz'"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if options[0].startswith("WORLD_SIZE="):
        monkeypatch.setenv("WORLD_SIZE", options.pop().partition("=")[2])
    recipe = runs.write(tmp_path / "recipe.yaml", out=str(tmp_path / "run"))
    assert said in complaint(capsys, "train", recipe, *options)
    assert not (tmp_path / "run").exists()


def test_ranks_meet_though_the_machines_own_name_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = tmp_path / "rank"  # in place of Python
    rank.write_text(f"#!/bin/sh\necho $MASTER_ADDR > {tmp_path}/met.$RANK\n")
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    monkeypatch.setattr(socket, "getfqdn", lambda *name: "no-such-machine.invalid")
    assert launch(["train"], ranks=2, restarts=0, say=print) == 0
    assert [(tmp_path / f"met.{number}").read_text().strip() for number in range(2)] == ["localhost"] * 2


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({0: RANK_LOST, 1: -9}, "rank 1 was ended by signal 9"),
        ({0: -15, 1: -9, 2: RANK_LOST}, "rank 1 was ended by signal 9"),  # torchrun ends with SIGTERM who is left
        ({0: CRASHED, 1: RANK_LOST}, "rank 0 ended with status 70"),
        ({0: RANK_LOST, 1: RANK_LOST}, "rank 0 ended with status 75, rank 1 ended with status 75"),
    ],
)
def test_who_died_is_told_from_who_noticed(codes: dict[int, int], said: str) -> None:
    assert deaths(codes) == said


@pytest.mark.slow
def test_a_group_starts_again_by_itself(tmp_path: Path) -> None:
    """The short form of tests/torture/ranks.py, which also compares the end with a run that nobody touched."""
    folder = tmp_path / "run"
    recipe = runs.write(tmp_path / "recipe.yaml", checkpoint={"every": 1, "keep": 2}, steps=24)
    with (tmp_path / "output.txt").open("wb") as output:
        line = command(recipe, folder, 2, "--restarts", "1")
        training = subprocess.Popen(line, cwd=runs.ROOT, stdout=output, stderr=output)
        while newest_step(folder) < 2:
            assert training.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.02)
        os.kill(ranks_of(folder)[1], signal.SIGKILL)
        assert training.wait() == 0, (tmp_path / "output.txt").read_text()
    said = (tmp_path / "output.txt").read_text()
    assert "rank 1 was ended by signal 9" in said and "resuming" in said
    assert "Traceback" not in said
    assert (folder / "final/model.safetensors").is_file()
    assert not ranks_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("nohup", [False, True])
def test_a_lost_terminal_stops_the_ranks_after_their_step_and_under_nohup_not(nohup: bool, tmp_path: Path) -> None:
    """The kernel and the shell both send SIGHUP to the launcher."""
    folder, steps = tmp_path / "run", 8 if nohup else 5000
    recipe = runs.write(tmp_path / "recipe.yaml", steps=steps, evaluation={"every": 0, "examples": 2})
    words = [*(["nohup"] if nohup else []), *command(recipe, folder, 2)]
    with (tmp_path / "output.txt").open("wb") as output:
        training = subprocess.Popen(words, cwd=runs.ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while not (folder / "metrics.jsonl").is_file() or len(runs.records(folder / "metrics.jsonl")) < 3:
            assert training.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.02)
        for _ in range(2):
            training.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert training.wait() == (0 if nohup else 130), (tmp_path / "output.txt").read_text()
    trained = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert runs.state(folder)["step"] == len(trained) > 0
    assert (folder / "final").exists() is nohup and not ranks_of(folder)


@pytest.mark.slow
def test_a_single_process_starts_again_after_an_exception(tmp_path: Path) -> None:
    algorithm = {"name": "tests.rank_targets:CrashesOnce", "group_size": 4, "marker": str(tmp_path / "marker")}
    recipe = runs.write(tmp_path / "recipe.yaml", algorithm=algorithm, steps=2)
    line = command(recipe, tmp_path / "run", 1, "--restarts", "2")
    done = subprocess.run(line, cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: the device went away" in done.stderr
    assert done.stderr.count("rank 0 ended with status 70") == 1
    assert (tmp_path / "run/final/model.safetensors").is_file()
