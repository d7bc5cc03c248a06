"""GRPO steps with `engine.ahead: 1` against the same steps without: a generator and the training process with a thread
each, by turns.

python -m benchmarks.ahead                      W1 in fp32
python -m benchmarks.ahead --workload w2 --compute bfloat16 --rounds 3
python -m benchmarks.ahead --completions 2 --new-tokens 8     to see that it works

While it is one run's turn, the other one's processes wait: a step ends when its answers ahead are there. A step ahead
lasts as long as the longer one of its halves, so the table has both: until the answers are there, and the rest.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import ray

from benchmarks import reports, workloads
from benchmarks.contenders.lmgym_step import DEFAULTS, config_of
from lmgym.algorithms.grpo.correction import Truncated
from lmgym.config.schema import Config
from lmgym.inference.kinds import EngineSection
from lmgym.logs.console import Console
from lmgym.training.begin_stage import begin_stage
from lmgym.training.loop import advance, begin_step, collate_step, gather
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update


def main() -> None:
    parser = reports.options(__doc__, [], rounds=5)
    parser.add_argument("--workload", choices=list(workloads.BY_NAME), default="w1")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    given = parser.parse_args()
    workload = reports.sized(workloads.BY_NAME[given.workload](given.seed), given)
    seconds: dict[str, list[tuple[float, float]]] = {"without": [], "one step ahead": []}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workloads.write(workload, Path(folder))
        stages = [stack.enter_context(opened(stack, Path(folder), workload, given.compute, ahead)) for ahead in (0, 1)]
        for turn in range(given.warmup + given.rounds):
            for stage, own in zip(stages, seconds.values(), strict=True):
                elapsed = step_seconds(stage)
                own += [elapsed] if turn >= given.warmup else []
    print(
        f"{workload.name}, {given.compute}, {given.rounds} rounds, a thread for each process; medians of a step in s "
        "(least to most)\n| | a step | until its answers are there | the rest |\n|---|---|---|---|"
    )
    steps = {name: [sum(halves) for halves in own] for name, own in seconds.items()}
    for name, own in seconds.items():
        columns = (steps[name], *([half[i] for half in own] for i in (0, 1)))
        print(f"| {name} | {' | '.join(spread(column) for column in columns)} |")
    most = [sum(halves) / max(halves) for halves in seconds["without"]]
    print(f"without / ahead: {reports.ratio(*steps.values())}; if nothing held up the longer half: {spread(most)}")


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def opened(
    stack: ExitStack, folder: Path, workload: workloads.Workload, compute: str, ahead: Literal[0, 1]
) -> StageRun:
    """The stage of a run on a pool of one generator, which computes a whole rollout together."""
    settings = {**DEFAULTS, "compute": compute, "threads": 1}
    config: Config = config_of(folder, workload, settings, str(folder / f"run-{ahead}"))
    [stage] = config.stages
    algorithm = replace(stage.algorithm, correction=Truncated())
    engine = EngineSection(name="pool", workers=1, threads=1, unit=len(workload.rows), ahead=ahead)
    config = replace(config, engine=engine, stages=[replace(stage, algorithm=algorithm)])
    run = stack.enter_context(start(config, stack.enter_context(Console(quiet=True))))
    return begin_stage(run)


def step_seconds(stage: StageRun) -> tuple[float, float]:
    """A step of `train`, without records: the seconds until its answers are there, and those of the rest."""
    step, run = stage.step, stage.run
    began = time.perf_counter()
    begin_step(stage, step)
    episodes = gather(stage, step)
    answered = time.perf_counter()
    batch = prepare(collate_step(stage, episodes, step), run.policy, stage.frozen_models.models, stage.algorithm)
    update(stage.algorithm, run.policy, batch, stage.optimizer)
    advance(stage)
    return answered - began, time.perf_counter() - answered


if __name__ == "__main__":
    main()
