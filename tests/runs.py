"""Tiny whole runs that several test files train: a recipe of a model of 5,000 parameters, and what its folder holds."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.logs.console import Console
from lmgym.tasks.base import load_task
from lmgym.training.loop import train
from lmgym.types import Example, LabelledStep, RatedAnswer

ROOT = Path(__file__).parents[1]
ARCHITECTURE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TINY: dict[str, Any] = {
    "threads": 1,
    "policy": {"model": "builtin:tiny", "device": "cpu", "architecture": ARCHITECTURE},
    "task": {"name": "arithmetic", "size": 64, "test_size": 16, "validation_size": 16, "largest": 5},
    # Untrained answers earn something now and then: the share of wanted length, and digits.
    "rewards": {"length": {"unit": "characters", "target": 6}, "regex": {"pattern": "[0-9]", "weight": 0.5}},
    "sampling": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 0.003, "warmup": 2},
    "algorithm": {"name": "grpo", "group_size": 4},
    "evaluation": {"every": 3, "examples": 8},
    "checkpoint": {"every": 4},
    "logs": {"samples": 2},
    "prompts_per_step": 4,
    "steps": 6,
}
RATED = ("dpo", "ipo", "simpo", "orpo", "kto", "reward_model")  # algorithms that learn from the rated answers of a task
JUDGED = "tests.runs:judged"
STEPS = "tests.runs:in_steps"
GIVEN = {**dict.fromkeys(RATED, JUDGED), "process_reward_model": STEPS}  # the task of each that samples no answers
WAITING = re.compile(r"lmgym: .*, \d+ s\n")  # what a slow machine is doing, and for how long
CLOCKS = ("seconds", "tokens_per_second", "memory")


def judged(split: str) -> list[Example]:
    """Sums with a right and a wrong answer each."""
    sums = load_task("arithmetic", split, size=64, test_size=16, validation_size=16, largest=5)
    wrong = [*sums[1:], sums[0]]
    return [
        replace(one, rated=(RatedAnswer(one.references[0], 1.0), RatedAnswer(other.references[0] + "!", 0.0)))
        for one, other in zip(sums, wrong, strict=True)
    ]


def in_steps(split: str) -> list[Example]:
    """Sums with an answer of one to three steps, every third step wrong."""
    sums = load_task("arithmetic", split, size=64, test_size=16, validation_size=16, largest=5)
    texts = [(one.references[0], "That is all", f"So {n % 7}!") for n, one in enumerate(sums)]
    return [
        replace(one, steps=tuple(LabelledStep(text, (n + k) % 3 > 0) for k, text in enumerate(own[: n % 3 + 1])))
        for n, (one, own) in enumerate(zip(sums, texts, strict=True))
    ]


def tiny(**changes: Any) -> dict[str, Any]:
    """The tree of a tiny recipe; a None removes a key."""
    tree = copy.deepcopy(TINY) | changes
    return {key: value for key, value in tree.items() if value is not None}


def write(path: Path, **changes: Any) -> Path:
    """A tiny recipe as a file."""
    path.write_text(yaml.safe_dump(tiny(**changes)))
    return path


def run(folder: Path, console: Console | None = None, **changes: Any) -> Path:
    """Train a tiny recipe in this process, silently."""
    return train(build_config(tiny(out=str(folder), **changes)), console or Console(quiet=True))


# For processes, what `no_picture` is for this one.
NO_PICTURE = """
import lmgym.training.evaluation_points
lmgym.training.evaluation_points.training_plot = lambda metrics, plot: plot
"""
DRIVER = """
import json, os, sys
import lmgym.training.dry_run, lmgym.training.loop, matplotlib.backends.backend_agg, matplotlib.style
from lmgym.cli.main import main
for line in sys.stdin:
    arguments, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        status = main(arguments)
        sys.stdout.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # what it has imported takes seconds to be taken down
"""


class Shell:
    """Runs `lmgym ...` in processes of their own, forked from one that has imported everything already (which would
    take each of them seconds).

    Example:
        >>> shell.start("train", recipe); os.kill(shell.process, signal.SIGKILL); shell.wait()
        -9
    """

    def __init__(self, folder: Path, prelude: str = "") -> None:
        """`prelude` is Python that runs first, for example further imports."""
        self.output = folder / "output.txt"
        self.process = 0
        pipe, command = subprocess.PIPE, [sys.executable, "-c", prelude + DRIVER]
        self.driver = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def start(self, *arguments: object) -> None:
        assert self.driver.stdin is not None
        if self.output.is_file() or not self.output.exists():  # no pipe
            self.output.write_text("")  # else `said` is the last command's, until this one has begun
        print(
            json.dumps([[str(argument) for argument in arguments], str(self.output)]),
            file=self.driver.stdin,
            flush=True,
        )
        self.process = self._read()

    def wait(self) -> int:
        """The exit status of the command, or minus the signal that ended it."""
        return self._read()

    def run(self, *arguments: object) -> int:
        self.start(*arguments)
        return self.wait()

    @property
    def said(self) -> str:
        return self.output.read_text()

    def close(self) -> None:
        assert self.driver.stdin is not None
        self.driver.stdin.close()
        self.driver.wait()

    def _read(self) -> int:
        assert self.driver.stdout is not None
        return int(self.driver.stdout.readline())


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence that a command that cannot go on leaves on standard error, without its "lmgym: "."""
    assert main([str(argument) for argument in arguments]) == 1
    lines = capsys.readouterr().err.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.endswith(" ...\n") and not WAITING.fullmatch(line))
    assert said.startswith("lmgym: ") and said.count("\n") == 1 and "Traceback" not in said, said
    return said.removeprefix("lmgym: ").strip()


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl or rollouts.jsonl, without what a clock or the machine put there."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept.append({name: value for name, value in record.items() if name.split("/")[0] not in CLOCKS})
    return kept


def as_json(interval: Any) -> dict[str, Any]:
    """An interval as JSON files hold it: null for bounds that cannot be had."""
    return {key: None if value != value else value for key, value in vars(interval).items()}


def newest(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((folder / "checkpoints").glob("stage-*"))


def state(folder: Path) -> dict[str, Any]:
    return json.loads((newest(folder) / "state.json").read_text())


def algorithm_state(folder: Path) -> dict[str, Any]:
    return json.loads((newest(folder) / "algorithm.json").read_text())


def assert_equal_runs(one: Path, other: Path, but: Collection[str] = ()) -> None:
    """Two finished runs are the same, bit for bit: parameters, moments, algorithm, rollouts, traces, metrics. `but`:
    files of a checkpoint that may differ, or that one of the two may lack."""
    names = []
    for folder in (one, other):
        paths = [path for own in (newest(folder), folder / "final", folder / "traces") for path in own.rglob("*")]
        names.append({str(path.relative_to(folder)) for path in paths if path.is_file() and path.name not in but})
    assert names[0] == names[1]
    models = {f"{newest(one).relative_to(one)}/{name}.safetensors" for name in ("model", "optimizer")}
    assert names[0] >= {*models, "final/model.safetensors"}
    for name in sorted(names[0] | {"rollouts.jsonl", "summary.json"}):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert records(one / "metrics.jsonl") == records(other / "metrics.jsonl")
