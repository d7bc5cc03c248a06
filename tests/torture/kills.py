"""Random kills: runs that are killed at any moment and started again must end as if nothing had happened.

    python -m tests.torture.kills --kills 1000 --seed 0

Each recipe is trained once without a kill. Then it is killed (SIGKILL) and started again until it ends, over and over
until its share of the kills is used. Half of the kills come at a random moment, half while a checkpoint is written. In
recipes with worker processes, every fourth kill hits one of these and not the run itself. A run that has ended must be
equal to the uninterrupted one, bit for bit; ten seconds after a kill no process of the run may be left.

A worker of an environment costs its episode when it is killed (docs/environments.md), so those runs cannot stay the
same: they must only end well, and are counted apart.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmgym.envs.base import Step
from lmgym.envs.tools.sandbox.runner import Limits, python_within
from lmgym.types import Example
from tests import runs
from tests.contract.test_agent_program import TRAINING as PROGRAMS
from tests.contract.test_every_algorithm import policy_section
from tests.parity.test_resume import ALGORITHMS, SETTINGS
from tests.parity.test_resume_environments import GAMES, NUMBERS
from tests.parity.test_resume_models import assert_equal_folders

ENDING = 10.0  # seconds after which no process of a killed run may be left
MARK = "LMGYM_TORTURE"  # in the environment of every process of the campaign
COMMON: dict[str, Any] = {
    "checkpoint": {"every": 1, "keep": 1},
    "evaluation": {"every": 4, "examples": 8, "keep_best": "reward", "final_split": "validation"},
    "steps": 30,
}
PLAY: dict[str, Any] = {
    "task": None,
    "rewards": {},
    "policy": NUMBERS,
    "sampling": {"max_new_tokens": 1},
    "algorithm": {"name": "rloo", "group_size": 4},
    "stages": [{"name": "warm", "algorithm": "supervised", "steps": 6}, {"name": "rl", "steps": 12}],
}
LORA = {"policy": policy_section("builtin:tiny", lora_rank=4)}


class Snippets:
    """One question; the sandbox adds up the letters of the answer."""

    def reset(self, example: Example, seed: int) -> str:
        self.python = python_within(Limits(isolation="process"))
        return "Say something."

    def step(self, text: str, stop: str) -> Step:
        letters = sum(letter.isalpha() for letter in text)
        return Step(reward=float(self.python(f"print({letters})")), terminated=True)


@dataclass(frozen=True)
class Recipe:
    """A recipe of the campaign. `workers`: what a killed worker process costs: "nothing" (its work is repeated), "an
    episode", or "" if the run has none."""

    changes: dict[str, Any]
    workers: str = ""


def of_algorithm(name: str, **changes: Any) -> Recipe:
    """The recipe of an algorithm of tests/parity/test_resume.py."""
    return Recipe({"algorithm": ALGORITHMS[name], **SETTINGS.get(name, {}), **changes})


RECIPES = {
    "supervised, then grpo with a reference": of_algorithm(
        "grpo, reference",
        stages=[{"name": "warm", "algorithm": "supervised", "steps": 10}, {"name": "rl", "steps": 25}],
    ),
    "ppo, critic apart": of_algorithm("ppo, separate critic"),
    "trpo": of_algorithm("trpo", steps=12),
    "nlpo, mask refreshed": Recipe({"algorithm": {**ALGORITHMS["nlpo"], "refresh_every": 5}, "steps": 20}),
    "replay": of_algorithm("replay"),
    "reinforce, moving mean": of_algorithm("reinforce ema"),
    "distil": of_algorithm("distill", **SETTINGS["distill"]),
    "three steps ahead": Recipe(
        {
            "algorithm": {"name": "grpo", "group_size": 4, "correction": {"name": "truncated"}},
            "engine": {"ahead": 3},
        }
    ),
    "three steps ahead, in chunks": Recipe(
        {
            "algorithm": {"name": "grpo", "group_size": 4, "correction": {"name": "truncated"}},
            "engine": {"ahead": 3, "chunk": 2},
        }
    ),
    "lora with a reference": of_algorithm("grpo, reference", **LORA),
    "t5 with a2c": Recipe({"policy": policy_section("builtin:tiny_t5"), "algorithm": {"name": "a2c"}, "steps": 20}),
    "rewards in processes": Recipe({"rewards": {"math_equal": 1.0, "length": {"target": 6}}}, workers="nothing"),
    "a game in processes": Recipe(
        {**PLAY, "env": {**GAMES["in processes"], "workers": 2}, "evaluation": {"env": GAMES["against itself"]}},
        workers="an episode",
    ),
    "programs that ask": Recipe({**PROGRAMS, "steps": 4}, workers="nothing"),
    "snippets in the sandbox": Recipe(
        {"env": "tests.torture.kills:Snippets", "rewards": {}, "task": "episodes", "steps": 4, "prompts_per_step": 2},
        workers="an episode",
    ),
}


@dataclass
class Tally:
    """What a recipe's kills have come to."""

    kills: int = 0
    saving: int = 0  # kills while a checkpoint was written
    workers: int = 0  # kills of worker processes
    ended: int = 0  # runs that were killed and reached their end
    equal: int = 0
    survived: int = 0  # runs without a kill of their own that lost workers
    slowest: float = 0.0  # seconds until no process was left
    failures: list[str] = field(default_factory=list)


def descendants(process: int) -> dict[int, str]:
    """All processes below this one, each with its start time: a number may come again."""
    parents: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for number in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            state = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(state[1]), []).append(number)
        started[number] = state[19]
    found, waiting = dict[int, str](), [process]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found[child] = started[child]
            waiting.append(child)
    return found


def left(seen: dict[int, str], driver: int) -> set[int]:
    """The processes of a run that still live: those that were seen below it, and those that bear the mark."""
    living = set()
    for number in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            state = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
            marked = MARK.encode() in Path(f"/proc/{number}/environ").read_bytes()
        except OSError:
            continue
        if state[0] != "Z" and number != driver and (marked or seen.get(number) == state[19]):
            living.add(number)
    return living


def saving(folder: Path) -> bool:
    return any(folder.glob(".saving-*")) or any(folder.glob("checkpoints/.saving-*"))


def wait_until(moment: Any, shell: runs.Shell, seconds: float) -> None:
    """Wait for a moment of the run, its end or a limit of time, whatever comes first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and Path(f"/proc/{shell.process}/exe").exists() and not moment():
        time.sleep(0.0005)


def killed_at_random(shell: runs.Shell, folder: Path, moments: random.Random, length: float, tally: Tally) -> bool:
    """Kill the run that the shell has started. False if it came to its end before."""
    if moments.random() < 0.5:
        time.sleep(moments.uniform(0.0, length))
    else:
        time.sleep(moments.uniform(0.0, length / 2))
        wait_until(lambda: saving(folder), shell, length)
        time.sleep(moments.uniform(0.0, 0.006))
    seen = descendants(shell.process)
    torn = saving(folder)
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(shell.process, signal.SIGKILL)
    status = shell.wait()
    began = time.monotonic()
    while still := left(seen, shell.driver.pid):
        if time.monotonic() > began + ENDING:
            tally.failures.append(f"kill {tally.kills}: processes {sorted(still)} are left after {ENDING:g} s")
            break
        time.sleep(0.02)
    tally.slowest = max(tally.slowest, time.monotonic() - began)
    if status == -signal.SIGKILL:
        tally.kills += 1
        tally.saving += torn
    elif status != 0:
        tally.failures.append(f"a run ended with status {status}: {shell.said[-500:]}")
    return status == -signal.SIGKILL


def kill_workers(shell: runs.Shell, moments: random.Random, length: float, most: int) -> int:
    """Kill up to `most` worker processes of a run that goes on. Returns how many."""
    killed = 0
    end = time.monotonic() + length
    while killed < most and time.monotonic() < end:
        time.sleep(moments.uniform(0.0, length / most))
        below = sorted(descendants(shell.process))
        if below:
            with suppress(ProcessLookupError):
                os.kill(moments.choice(below), signal.SIGKILL)
                killed += 1
    return killed


def campaign(name: str, recipe: Recipe, shell: runs.Shell, kills: int, seed: int, folder: Path) -> Tally:
    """All kills of one recipe. Equal runs are removed; those that differ stay, and are named."""
    tally, moments = Tally(), random.Random(f"{seed} {name}")
    path = runs.write(folder / "recipe.yaml", **COMMON | recipe.changes)
    whole = folder / "whole"
    began = time.monotonic()
    if shell.run("train", path, f"out={whole}") != 0:
        tally.failures.append(f"without any kill: {shell.said[-500:]}")
        return tally
    length = time.monotonic() - began
    number = 0
    while tally.kills + tally.workers < kills:
        number += 1
        run = folder / f"run-{number}"
        if recipe.workers and number % 2 == 0:
            shell.start("train", path, f"out={run}")
            tally.workers += kill_workers(shell, moments, length, 4)
            if (status := shell.wait()) != 0:
                tally.failures.append(f"{run}: lost workers and ended with status {status}: {shell.said[-500:]}")
            tally.survived += status == 0
        else:
            while tally.kills + tally.workers < kills:
                shell.start("train", path, f"out={run}")
                if not killed_at_random(shell, run, moments, length, tally):
                    break
            if shell.run("train", path, f"out={run}") != 0:
                tally.failures.append(f"{run}: {shell.said[-500:]}")
            tally.ended += 1
        if recipe.workers == "an episode" and number % 2 == 0:
            shutil.rmtree(run)
            continue
        try:
            assert_equal_folders(whole, run)
            assert not saving(run), "a half written checkpoint is left"
        except (AssertionError, OSError, ValueError) as error:  # ValueError: there is no checkpoint at all
            tally.failures.append(f"{run} differs: {str(error)[:300]}")
        else:
            tally.equal += 1
            shutil.rmtree(run)
    return tally


def report(tallies: dict[str, Tally], seed: int) -> None:
    columns = ("kills", "while saving", "of workers", "runs ended", "equal", "slowest end, s", "failures")
    table = Table("recipe", title=f"random kills, seed {seed}")
    for column in columns:
        table.add_column(column, justify="right")
    for name, t in tallies.items():
        ended = t.ended + t.survived
        numbers = (t.kills, t.saving, t.workers, ended, t.equal, f"{t.slowest:.1f}", len(t.failures))
        table.add_row(name, *map(str, numbers))
    Console(width=140).print(table)
    for name, t in tallies.items():
        for failure in t.failures:
            print(f"{name}: {failure}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.kills", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only recipes whose name contains this")
    given = parser.parse_args(arguments)
    chosen = {name: recipe for name, recipe in RECIPES.items() if (given.only or "") in name}
    share = -(-given.kills // len(chosen))
    folder = Path(tempfile.mkdtemp(prefix="lmgym-kills-"))
    os.environ[MARK] = "1"
    shell, tallies = runs.Shell(folder), dict[str, Tally]()
    for number, (name, recipe) in enumerate(chosen.items()):
        (own := folder / str(number)).mkdir()
        began = time.monotonic()
        tallies[name] = tally = campaign(name, recipe, shell, share, given.seed, own)
        print(f"{name}: {tally.kills + tally.workers} kills, {time.monotonic() - began:.0f} s", flush=True)
        for failure in tally.failures:  # now, too: whoever stops the campaign has them
            print(f"{name}: {failure}", flush=True)
        if not tally.failures:
            shutil.rmtree(own)
    shell.close()
    report(tallies, given.seed)
    failed = any(tally.failures for tally in tallies.values())
    print(f"the runs are kept in {folder}" if failed else "no failure")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
