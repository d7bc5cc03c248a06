"""Ranks that are killed: the run must go on by itself, and end like the run that nobody touched.

    python -m tests.torture.ranks --kills 50 --size 2

`lmgym train RECIPE --ranks 2 --restarts N` is started once. After every second checkpoint one rank is killed (SIGKILL),
each in turn. Measured is the time from a kill to the next checkpoint, without the time that a first start takes.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests import runs
from tests.runs import ROOT, assert_equal_runs

RECIPE = {
    "algorithm": {"name": "ppo", "epochs": 2, "kl_coefficient": 0.1},
    "checkpoint": {"every": 1, "keep": 2},
    "evaluation": {"every": 0, "examples": 8},
}
LONGEST_WAIT = 120.0  # seconds for the next checkpoint; more counts as a hang


def ranks_of(folder: Path) -> dict[int, int]:
    """The process of each rank that trains into a folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = dict(word.partition(b"=")[::2] for word in (process / "environ").read_bytes().split(b"\0"))
        except OSError:  # it has ended, or is not ours
            continue
        if f"out={folder}".encode() in words and b"RANK" in environment:
            found[int(environment[b"RANK"])] = int(process.name)
    return found


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; -1 without one."""
    return max((int(path.name[-6:]) for path in folder.glob("checkpoints/stage-0-step-*")), default=-1)


def wait_for_step(folder: Path, step: int, training: subprocess.Popen[bytes]) -> float:
    """Seconds until there is a checkpoint of this step or a later one, or until the training ends."""
    began = time.monotonic()
    while newest_step(folder) < step and training.poll() is None:
        if time.monotonic() - began > LONGEST_WAIT:
            raise SystemExit(f"hang: no checkpoint of step {step} after {LONGEST_WAIT:g} s in {folder}")
        time.sleep(0.02)
    return time.monotonic() - began


def command(recipe: Path, folder: Path, size: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "lmgym", "train", str(recipe), f"out={folder}", "--ranks", str(size), *more]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--size", type=int, default=2, help="ranks (%(default)s)")
    given = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp(prefix="lmgym-ranks-"))
    steps = 4 * given.kills + 4  # one or two more pass before a kill takes effect
    recipe = runs.write(place / "recipe.yaml", **RECIPE, steps=steps)
    whole, killed = place / "whole", place / "killed"
    with (place / "output.txt").open("wb") as output:
        # The run that nobody touches; how long it takes until its first checkpoint.
        training = subprocess.Popen(command(recipe, whole, given.size), cwd=ROOT, stdout=output, stderr=output)
        start_up = wait_for_step(whole, 1, training)
        if training.wait():
            raise SystemExit(f"the untouched run failed, see {output.name}")
        # The other one.
        more = ("--restarts", str(given.kills))
        training = subprocess.Popen(command(recipe, killed, given.size, *more), cwd=ROOT, stdout=output, stderr=output)
        waits = []
        for kill in range(given.kills):
            wait_for_step(killed, newest_step(killed) + 2, training)
            step, victim = newest_step(killed), ranks_of(killed).get(kill % given.size)
            if victim is None:
                print(f"it ended after {kill} kills: rank {kill % given.size} is not there")
                break
            os.kill(victim, signal.SIGKILL)
            waits.append(wait_for_step(killed, step + 1, training) - start_up)
        status = training.wait()
    print(f"{len(waits)} kills of {given.size} ranks: ended with status {status}")
    print(f"start-up {start_up:.1f} s; beyond it, to the next checkpoint: {sum(waits) / len(waits):.1f} s on average, "
          f"{max(waits):.1f} s at most")  # fmt: skip
    assert status == 0, output.name
    assert_equal_runs(whole, killed)
    print("the end is equal bit for bit")
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
