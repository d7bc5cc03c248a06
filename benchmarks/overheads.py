"""Where the milliseconds of a step go if there is next to nothing to compute: 0.84M parameters, 64 answers of 8 tokens.

python -m benchmarks.overheads
python -m benchmarks.overheads --steps 200 --compute bfloat16

CPU milliseconds of one thread, each part's own (what it calls that is a part too is not counted twice): medians over
the steps, quartiles behind. CPU time, because other work on the machine moves it less than the wall clock.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import workloads
from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.core.registry import register
from lmgym.inference.decoder import Decoder
from lmgym.inference.drawing import Drawing
from lmgym.inference.kernels.mkl_linear import MKLLinearLayers
from lmgym.inference.kernels.onednn_layers import OneDNNLinearLayers
from lmgym.inference.sampler import Sampler
from lmgym.logs.console import Console
from lmgym.rewards.base import episodes
from lmgym.rollouts import play
from lmgym.training import loop
from lmgym.training.begin_stage import begin_stage
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.types import Episode
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update

PREPARED = (MKLLinearLayers, OneDNNLinearLayers)
WARMUP = 5


@register("reward", "last_digits")
@episodes
def last_digits(answers: list[Episode]) -> list[float]:
    return [workloads.reward(answer.turns[-1].action_ids) for answer in answers]


class Clock:
    """Own CPU seconds of nested parts, by name.

    Example: clock = Clock(); clock.part("update", update)(algorithm, policy, batch, optimizer); clock.take()
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.process_time()

    def part(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as a part."""

        @functools.wraps(work)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self._open.append(name)
            try:
                return work(*arguments, **named)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        found, self.seconds = self.seconds, {}
        return found

    def _turn(self) -> None:
        """What has passed belongs to the innermost part that is open."""
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    clock = Clock()
    watch(clock)
    with tempfile.TemporaryDirectory() as out, Console(quiet=True) as console:
        run = start(recipe(out, arguments.compute), console)
        with run, begin_stage(run) as stage:
            steps = [one_step(stage, clock) for _ in range(WARMUP + arguments.steps)][WARMUP:]
    report(steps)


def recipe(out: str, compute: str) -> Config:
    """64 answers of exactly 8 tokens; hardly ever do all answers of a group earn the same, so all are trained on."""
    return build_config({
        "out": out,
        "threads": 1,
        "task": {"name": "arithmetic", "largest": 50, "explain": "sums"},
        "rewards": {"last_digits": 1.0},
        "policy": {"model": "builtin:sums", "device": "cpu", "compute": compute},
        "sampling": {"max_new_tokens": 8, "min_new_tokens": 8},
        "algorithm": {"name": "grpo", "group_size": 8},
        "optimizer": {"learning_rate": 1e-6},
        "prompts_per_step": 8,
        "steps": 1_000_000,
    })  # fmt: skip


def watch(clock: Clock) -> None:
    """Time the parts of a rollout, wherever they are called from."""
    places: list[tuple[Any, str, str]] = [
        (Sampler, "generate", "other sampling"),
        (Decoder, "_admit", "prefill"),
        (Decoder, "_step", "decoding"),
        (Drawing, "draw", "draw"),
        *((kind, name, "layout of weights") for kind in PREPARED for name in ("begin_step", "release")),
        (play, "apply_rewards", "rewards"),
    ]
    for owner, name, part in places:
        setattr(owner, name, clock.part(part, getattr(owner, name)))


def one_step(stage: StageRun, clock: Clock) -> dict[str, float]:
    """A step as `train` takes it."""
    step = stage.step

    def begin_and_gather() -> Any:
        loop.begin_step(stage, step)
        return loop.gather(stage, step)

    def collate_and_prepare() -> Any:
        batch = loop.collate_step(stage, answers, step)
        return prepare(batch, stage.run.policy, stage.frozen_models.models, stage.algorithm)

    def advance_and_log() -> None:
        loop.advance(stage)
        loop.log_step(stage, answers, batch, metrics)

    answers = clock.part("episodes", begin_and_gather)()
    batch = clock.part("collate, prepare", collate_and_prepare)()
    metrics = clock.part("update", update)(stage.algorithm, stage.run.policy, batch, stage.optimizer)
    clock.part("push, log, traces", advance_and_log)()
    return clock.take()


def report(steps: list[dict[str, float]]) -> None:
    totals = [sum(step.values()) for step in steps]
    names = sorted({name for step in steps for name in step}, key=lambda name: -sum(s.get(name, 0) for s in steps))
    print("| part | ms a step (quartiles) | share |\n|---|---|---|")
    for name in [*names, "all"]:
        own = [
            1e3 * (total if name == "all" else step.get(name, 0.0)) for step, total in zip(steps, totals, strict=True)
        ]
        low, middle, high = statistics.quantiles(own, n=4)
        print(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {sum(own) / sum(totals) / 10:.0f} % |")


if __name__ == "__main__":
    main()
