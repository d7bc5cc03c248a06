"""What traces/ costs: the time and the bytes of recording beside whole steps, with and without it, by turns.

    python -m benchmarks.traces --rounds 5
    python -m benchmarks.traces --rounds 1 --steps 4      short: only the recording's own time means anything

Each round trains every workload with `logs.traces` none, some and all. Prints a Markdown table: median seconds from one
step to the next (logs included, without each run's first two steps), the milliseconds a step that the functions of
training/tracing.py took in the same steps, and the bytes in traces/ a step and a sampled token of the answers in it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quickstart import RECIPE
from lmgym.config.build import build_config
from lmgym.logs.console import Console
from lmgym.logs.traces import read_step, shards
from lmgym.training import loop, tracing

WARM_UP = 2  # steps of a run that are not counted
KINDS = ("none", "some", "all")


def workloads(steps: int) -> dict[str, dict[str, Any]]:
    """The recipes, by what they are about."""
    words = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    stage = words.pop("stages")[-1]
    del stage["name"]
    rare = {"examples": 8, "every": 0, "split": "validation"}
    short = words | stage | {"evaluation": rare, "steps": steps, "threads": 1}
    long = {
        "threads": 1,
        "task": {"name": "arithmetic", "size": 512, "largest": 50},
        "rewards": {"length": {"unit": "characters", "target": 80}},
        "policy": {"model": "builtin:tiny", "device": "cpu"},
        "sampling": {"max_new_tokens": 96, "min_new_tokens": 96},
        "algorithm": {"name": "grpo", "group_size": 8},
        "prompts_per_step": 8,
        "evaluation": rare,
        "steps": steps,
    }
    return {
        "quickstart's GRPO, 256 answers of 9 tokens": short,
        "GRPO, 64 answers of 96 tokens": long,
        "PPO with a reference, 4 epochs, 64 answers of 96 tokens": long
        | {"algorithm": {"name": "ppo", "kl_coefficient": 0.1}, "prompts_per_step": 64},
    }


class Clock(Console):
    """When each step ended, and what its recording took."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.ends: list[float] = []
        self.recording: list[float] = []
        self.own = 0.0

    def step(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())
        self.recording.append(self.own)
        self.own = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.own += time.perf_counter() - began

        return measured


def trained(recipe: dict[str, Any], kind: str, folder: Path) -> tuple[list[float], list[float]]:
    """Train in this process; seconds from step to step, and those of them that recording took."""
    clock = Clock()
    usual = (loop.begin_trace, loop.write_trace, tracing.StepTrace.show, tracing.StepTrace.wants)
    loop.begin_trace, loop.write_trace = clock.timed(usual[0]), clock.timed(usual[1])
    tracing.StepTrace.show, tracing.StepTrace.wants = clock.timed(usual[2]), clock.timed(usual[3])  # type: ignore[method-assign]
    try:
        logs = {"samples": 0, "traces": kind}
        loop.train(build_config(recipe | {"out": str(folder), "logs": logs, "checkpoint": {"every": 0}}), clock)
    finally:
        loop.begin_trace, loop.write_trace = usual[:2]
        tracing.StepTrace.show, tracing.StepTrace.wants = usual[2:]  # type: ignore[method-assign]
    between = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return between[WARM_UP - 1 :], clock.recording[WARM_UP:]


def bytes_of(folder: Path) -> tuple[float, float]:
    """Bytes of traces/ a step, and for each sampled token of the answers that are whole in it."""
    tokens, places = 0, shards(folder)
    for stage, step in places:
        table = read_step(folder, stage, step).episodes
        tokens += sum(length for length, kept in zip(table["length"], table["kept"], strict=True) if kept)
    size = sum(path.stat().st_size for path in (folder / "traces").iterdir())
    return size / len(places), size / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of workloads, from 0")
    given = parser.parse_args()
    print("| workload | traces | seconds a step | recording, ms | share | bytes a step | bytes a token |")
    print("|---|---|---|---|---|---|---|")
    for number, (name, recipe) in enumerate(workloads(given.steps).items()):
        if given.only and number not in given.only:
            continue
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        recording: dict[str, list[float]] = {kind: [] for kind in KINDS}
        sizes = {"none": (0.0, 0.0)}
        with tempfile.TemporaryDirectory() as folder:
            for round_number in range(given.rounds):
                for kind in KINDS:
                    run = Path(folder) / f"{kind}-{round_number}"
                    whole, own = trained(recipe, kind, run)
                    seconds[kind] += whole
                    recording[kind] += own
                    if kind != "none":
                        sizes[kind] = bytes_of(run)
        for kind in KINDS:
            whole_step, own_step = statistics.median(seconds[kind]), statistics.median(recording[kind])
            cells = [f"{whole_step:.3f}", f"{1000 * own_step:.1f}", f"{own_step / whole_step:.1%}"]
            cells += [f"{size:,.0f}" for size in sizes[kind]]
            print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
