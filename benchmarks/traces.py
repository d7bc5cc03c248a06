"""What traces/ costs: the time and the bytes of recording beside whole steps, with and without it, by turns.

    python -m benchmarks.traces --rounds 5
    python -m benchmarks.traces --recording      the recording alone, of a step that is made up: a minute

Each round trains every workload with `logs.traces` none, some and all. Prints a Markdown table: median seconds from one
step to the next (logs included, without each run's first two steps), the milliseconds a step that the functions of
training/tracing.py took in the same steps, and the bytes in traces/ a step and a sampled token of the answers in it.
`--recording` prints processor milliseconds and bytes for steps of so many answers and tokens, which hardly depend on
what else the machine does.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.quickstart import RECIPE
from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import collate
from lmgym.config.build import build_config
from lmgym.distributed.ranks import ALONE
from lmgym.logs.console import Console
from lmgym.logs.traces.folder import TraceFolder
from lmgym.logs.traces.trace import read_step, shards
from lmgym.training import loop, tracing
from lmgym.types import Episode, Example, Turn

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


def made_up(answers: int, tokens: int) -> list[Episode]:
    """Scored answers of so many tokens, in groups of 8, to prompts of 60 tokens."""
    numbers, episodes = np.random.default_rng(0), []
    for index in range(answers):
        example = Example(f"a/{index // 8}", "Tom has 3 apples and buys 4. How many has he? " * 4, ("7",))
        ids, logprobs = numbers.integers(0, 1000, tokens), -numbers.exponential(size=tokens)
        prompt, text = numbers.integers(0, 1000, 60), "some words " * (tokens // 3)
        turn = Turn(prompt.tolist(), ids.tolist(), logprobs.tolist(), text, reward=float(numbers.random()))
        messages = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": text}]
        parts = {"right": turn.reward, "short": 1.0}
        episodes.append(Episode(example, index // 8, index, [turn], True, 0, parts, turn.reward, True, messages))
    return episodes


def recording(kind: str, algorithm: Algorithm, answers: int, tokens: int, folder: Path) -> tuple[float, float, int]:
    """Median processor milliseconds and the bytes of recording one step, and the sampled tokens that it keeps."""
    episodes = made_up(answers, tokens)
    batch = collate(episodes)
    noise = torch.randn(5, *batch.actions.shape) * batch.actions
    critic = algorithm.requirements.values
    # What GRPO has of a token: two numbers that differ from token to token, and others that are equal in a row. PPO
    # with a reference: almost all differ.
    batch = batch.replace(advantages=noise[0] if critic else batch.per_token(batch.score - 0.5))
    if critic:
        batch = batch.replace(returns=noise[1], values=noise[2], logprobs_old=noise[3], logprobs_ref=noise[4])
    shown = {"logprobs": noise[3], "advantages": batch.advantages, "loss/policy": -batch.advantages}
    shown |= {"push/policy": batch.advantages, **({"loss/value": noise[2]} if critic else {})}
    shown |= {name: batch.actions.float() for name in ("weight/policy", "ratio/mean", "ratio/clipped", "kl/old")}
    run = SimpleNamespace(
        config=SimpleNamespace(logs=SimpleNamespace(traces=kind)),
        ranks=ALONE,
        traces=TraceFolder(folder, 2**40, print),
    )
    train = SimpleNamespace(name="train")
    stage: Any = SimpleNamespace(run=run, path=(0,), index=0, algorithm=algorithm, config=train)
    times = []
    for step in range(15):
        began = time.process_time()
        trace = tracing.begin_trace(stage, episodes, batch, step)
        assert trace is not None
        trace.show(batch.require("row"), shown)
        tracing.write_trace(stage, episodes, batch, trace)
        times.append(1000 * (time.process_time() - began))
    size = sum(path.stat().st_size for path in (folder / "traces").iterdir())
    return statistics.median(times), size / len(times), tokens * len(trace.kept)


def print_recording() -> None:
    """The table of `--recording`."""
    torch.set_num_threads(1)
    print("| algorithm | traces | answers | tokens each | tokens kept | ms a step | bytes a step | bytes a token |")
    print("|---|---|---|---|---|---|---|---|")
    for algorithm in (GRPO(), PPO(kl_coefficient=0.1)):
        for kind, answers, tokens in itertools.product(("some", "all"), (64, 256), (9, 96, 512)):
            with tempfile.TemporaryDirectory() as folder:
                milliseconds, size, kept = recording(kind, algorithm, answers, tokens, Path(folder))
            cells = [type(algorithm).__name__, kind, answers, tokens, f"{kept:,}", f"{milliseconds:.1f}"]
            print("|", " | ".join(map(str, [*cells, f"{size:,.0f}", f"{size / kept:.0f}"])), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of workloads, from 0")
    parser.add_argument("--recording", action="store_true", help="the recording alone")
    given = parser.parse_args()
    if given.recording:
        print_recording()
        return
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
