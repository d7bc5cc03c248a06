"""Hostile environments: a small run with each ends as it should, in one process and folder, without a traceback.

python -m tests.torture.environments             # every kind
python -m tests.torture.environments fork huge   # some kinds
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example

HERE = "tests.torture.environments"
STEPS, SECONDS = 2, 120
DONE = Step(terminated=True, reward=1.0)


def fork() -> Step:
    """The child goes on, too."""
    os.fork()
    return DONE


def late_fork() -> Step:
    """The child comes back later."""
    if os.fork() == 0:
        os.system("sleep 0.5")
    return DONE


def huge() -> Step:
    return Step([{"role": "user", "content": "a" * 10_000_000}])


def full() -> Step:
    """Fills the model's context."""
    return Step([{"role": "user", "content": "a" * 1000}])


def array() -> Any:
    return Step(terminated=True, reward=np.array([0.5]))  # type: ignore[arg-type]


def pair() -> Any:
    return Step(terminated=True, reward=np.array([0.5, 1.0]))  # type: ignore[arg-type]


def leave() -> Step:
    sys.exit(3)


async def later() -> Step:
    await asyncio.sleep(0.01)
    return DONE


async def leave_later() -> Step:
    await asyncio.sleep(0.01)
    sys.exit(3)


def notes() -> Step:
    """Notes what no file holds."""
    return Step(terminated=True, info={"object": object(), "nan": float("nan"), "text": "\ud800"})


KINDS: dict[str, tuple[Callable[[], Any], str]] = {  # and what the run says if it cannot end well
    "fork": (fork, ""),
    "late_fork": (late_fork, ""),
    "huge": (huge, "wrote 10,000,000 characters at once"),
    "full": (full, ""),
    "array": (array, ""),
    "pair": (pair, "the environment paid the reward"),
    "leave": (leave, "SystemExit: 3"),
    "later": (later, ""),
    "leave_later": (leave_later, "SystemExit: 3"),
    "notes": (notes, ""),
}


@register("env", "hostile")
class Hostile:
    needs_data = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reset(self, example: Example, seed: int) -> str:
        return "go"

    def step(self, text: str, stop: str) -> Any:
        return KINDS[self.kind][0]()


def run(kind: str, workers: int, folder: Path) -> None:
    """A run with such an environment, in this process. Prints the error's sentence, if it ends with one."""
    from lmgym.config.build import build_config  # here, since the workers import this module
    from lmgym.logs.console import Console
    from lmgym.training.loop import train
    from tests import runs

    tree = {**runs.TINY, "plugins": [HERE], "env": {"name": "hostile", "kind": kind, "workers": workers}}
    tree |= {"rewards": None, "steps": STEPS, "out": str(folder)}
    try:
        train(build_config({key: value for key, value in tree.items() if value is not None}), Console(quiet=True))
    except LmgymError as error:
        print(error)


def check(kind: str, workers: int) -> str:
    """What is wrong with the end of such a run; empty if nothing is."""
    from lmgym.logs.records import read_records

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, "-m", HERE, "--run", kind, str(workers), str(folder)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"did not end within {SECONDS} s"
        if ended.returncode or "Traceback" in ended.stderr:
            return f"status {ended.returncode}: {ended.stderr[-500:]}"
        expected = KINDS[kind][1]
        if expected not in ended.stdout or bool(expected) != bool(ended.stdout.strip()):
            return f"said {ended.stdout.strip()!r}"
        steps = [record["step"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]
        return "" if expected or steps == list(range(STEPS)) else f"has the steps {steps}"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--run"]:
        run(arguments[1], int(arguments[2]), Path(arguments[3]))
        return 0
    failed = 0
    for kind in arguments or KINDS:
        for workers in (0, 1):
            problem = check(kind, workers)
            failed += bool(problem)
            print(f"{kind}, {workers} workers: {problem or 'as it should'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
