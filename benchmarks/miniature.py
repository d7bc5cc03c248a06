"""LLM_RL's headline in small: recipes/llm_rl_miniature.yaml over several seeds, before and after reinforce_stable.

python -m benchmarks.miniature                            seeds 10, 11 and 12, one after the other
python -m benchmarks.miniature --seeds 20 21 --jobs 2
python -m benchmarks.miniature --seeds 0 evaluation.final_split=null       while choosing settings: validation only

Each run is one process of one thread. Exact match on held-out problems, greedy, with Wilson intervals; then the mean
over seeds with a Student t interval. The last column is the share of the test problems whose working (the sums, not the
names) is that of a training problem: the texts are disjoint, the sums of so small numbers are not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.numbers import interval
from lmgym.config import Config, load_config
from lmgym.tasks.base import load

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "llm_rl_miniature.yaml"
METRIC = "final_answer"


@dataclass(frozen=True)
class Outcome:
    """One run: the metric's mean and interval before and after the last stage, and what it took."""

    seed: int
    split: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    warm_steps: int
    steps: int
    minutes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda seed: run(seed, arguments.overrides), arguments.seeds))
    print(table(outcomes))
    print(f"\n{overlap(load_config(RECIPE, list(arguments.overrides)))}")


def run(seed: int, overrides: Sequence[str]) -> Outcome:
    """Train once; what it prints is thrown away unless it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["train", str(RECIPE), f"seed={seed}", f"out={out}", *overrides]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "lmgym.cli", *command], capture_output=True, text=True, cwd=ROOT)
        minutes = (time.perf_counter() - began) / 60
        if done.returncode:
            sys.exit(f"seed {seed}: {done.stderr.strip()}")
        summary = json.loads((out / "summary.json").read_text())
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    before, after = (_interval(summary[moment]["results"][METRIC]) for moment in ("before", "after"))
    taken = [sum(r["kind"] == "train" and r["stage"] == stage for r in records) for stage in (0, 1)]
    outcome = Outcome(seed, summary["after"]["split"], before, after, *taken, minutes)
    print(outcome, file=sys.stderr)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per seed, and the means over seeds."""
    lines = [
        f"| seed | before, {outcomes[0].split} [95 %] | after [95 %] | warm-start steps | steps | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        before, after = (f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in (o.before, o.after))
        lines.append(f"| {o.seed} | {before} | {after} | {o.warm_steps} | {o.steps} | {o.minutes:.1f} |")
    if len(outcomes) > 1:
        columns = [np.array([getattr(o, moment)[0] for o in outcomes]) for moment in ("before", "after")]
        means = [f"{c.mean():.3f} [{low:.3f}, {high:.3f}]" for c in columns for low, high in [interval(c)]]
        lines.append(f"| mean | {means[0]} | {means[1]} | | | |")
    return "\n".join(lines)


def overlap(config: Config) -> str:
    """How far the splits are apart: prompts in two of them (there is none), and sums of test that train has too."""
    sets = {}
    for stage in config.stages:
        for split in ("train", "validation", "test"):
            arguments = {key: value for key, value in stage.task.items() if key not in ("name", "split")}
            sets[stage.name, split] = load(stage.task["name"], split, seed=config.seed, **arguments)
    lines = []
    for stage in config.stages:
        train, test = sets[stage.name, "train"], sets[stage.name, "test"]
        shared = {e.prompt for e in train} & {e.prompt for e in test}
        known = {e.references for e in train}
        share = sum(e.references in known for e in test) / len(test)
        lines.append(
            f"{stage.name}: {len(train)} training problems, {len(test)} test problems, {len(shared)} in both; "
            f"the working of {share:.0%} of the test problems occurs in training, told of another"
        )
    return "\n".join(lines)


def _interval(result: dict[str, Any]) -> tuple[float, float, float]:
    return result["mean"], result["low"], result["high"]


if __name__ == "__main__":
    main()
