"""Algorithms on RL4LMs' increasing_numbers, from random weights: episodes and seconds to a mean reward of 0.9.

python -m benchmarks.numbers                            the table: six algorithms, two models, three seeds
python -m benchmarks.numbers --only ppo --seeds 5       one of them
python -m benchmarks.numbers --compare nlpo ppo --seeds 0 1 2 3 4 --steps 100       the same budget, no early stop

Each run is one process of one thread on lmgym/recipes/increasing_numbers.yaml; `--jobs` of them side by side. The
mean is over 160 sampled answers to held-out prompts of the validation split, looked at every 10 steps; seconds are
the whole process. The comparison reports the test split at the end of the budget, with a Student t interval over seeds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training import ROOT, train
from lmgym.stats.intervals import student_t

RECIPE = ROOT / "lmgym" / "recipes" / "increasing_numbers.yaml"
TARGET = 0.9
MODELS = ("builtin:tiny_gpt2", "builtin:tiny_t5")
EPOCHS = {"epochs": 4, "minibatches": 2, "whiten": "none", "gae_lambda": 1.0, "entropy_coefficient": 0.003}
GROUPS = {"group_size": 8}
# What differs from the recipe, by algorithm (docs/log.md says how it was chosen).
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": {"name": "ppo", **EPOCHS}},
    "nlpo": {"algorithm": {"name": "nlpo", "top_mask": 0.9, "min_tokens_to_keep": 10, **EPOCHS}},
    "a2c": {
        "algorithm": {"name": "a2c", "preset": "nanorl", "entropy_coefficient": 0.05},
        "optimizer.learning_rate": 3e-3,
        "steps": 1500,
    },
    "trpo": {
        "algorithm": {
            "name": "trpo",
            "delta": 0.1,
            "gae_lambda": 1.0,
            "subsample": 0.05,
            "iterations": 10,
            "critic_epochs": 1,
            "critic_minibatches": 2,
        },
        "optimizer.learning_rate": 3e-3,
        "prompts_per_step": 512,
    },
    "grpo": {
        "algorithm": {"name": "grpo", "epochs": 4, "minibatches": 2, "entropy_coefficient": 0.002, **GROUPS},
        "prompts_per_step": 16,
    },
    "rloo": {
        "algorithm": {"name": "rloo", "entropy_coefficient": 0.05, **GROUPS},
        "prompts_per_step": 16,
        "optimizer.learning_rate": 4e-3,
        "steps": 1500,
    },
}


@dataclass(frozen=True)
class Outcome:
    """One run: the first evaluation at or above the target, or none; and the last means."""

    algorithm: str
    model: str
    seed: int
    episodes: int | None
    seconds: float
    last: float  # mean of the validation split at the end
    test: float
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    names = arguments.compare or arguments.only
    wanted = [(name, model, seed) for model in arguments.models for seed in arguments.seeds for name in names]
    more = list(arguments.overrides)
    if arguments.steps:
        more.append(f"steps={arguments.steps}")
    if arguments.compare:
        more.append("early_stop=null")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda one: run(*one, more), wanted))
    print(comparison(outcomes, names) if arguments.compare else table(outcomes))


def run(algorithm: str, model: str, seed: int, more: Sequence[str]) -> Outcome:
    """One algorithm on one model with one seed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {**SETTINGS[algorithm], "policy.model": model, "seed": seed, "out": str(out)}
        written = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        seconds = train(RECIPE, [*written, *more])
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    seen = [record for record in records if record["kind"] == "evaluation"]
    validation = [record for record in seen if record["split"] == "validation"]
    reached = next((record["step"] for record in validation if record["increasing_numbers"] >= TARGET), None)
    answers = settings.get("prompts_per_step", 128) * settings["algorithm"].get("group_size", 1)
    test = [record for record in seen if record["split"] == "test"][-1]["increasing_numbers"]
    outcome = Outcome(
        algorithm, model, seed, None if reached is None else reached * answers, seconds,
        validation[-1]["increasing_numbers"], test, len(steps),
    )  # fmt: skip
    print(outcome, file=sys.stderr)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per model and algorithm, each seed's episodes and seconds to the target."""
    lines = ["| model | algorithm | reached | episodes to 0.9, by seed | seconds, by seed |", "|---|---|---|---|---|"]
    for model, algorithm in dict.fromkeys((o.model, o.algorithm) for o in outcomes):
        own = [o for o in outcomes if (o.model, o.algorithm) == (model, algorithm)]
        episodes = ", ".join(f"{o.episodes:,}" if o.episodes is not None else f"no ({o.last:.2f})" for o in own)
        reached = f"{sum(o.episodes is not None for o in own)} of {len(own)}"
        seconds = ", ".join(f"{o.seconds:.0f}" for o in own)
        lines.append(f"| {model.removeprefix('builtin:')} | {algorithm} | {reached} | {episodes} | {seconds} |")
    return "\n".join(lines)


def comparison(outcomes: Sequence[Outcome], names: Sequence[str]) -> str:
    """Means over seeds on the test split with 95 % intervals, and that of the paired difference."""
    lines = ["| model | contender | test mean, by seed | mean over seeds [95 %] |", "|---|---|---|---|"]
    for model in dict.fromkeys(o.model for o in outcomes):
        by_name = {n: np.array([o.test for o in outcomes if (o.model, o.algorithm) == (model, n)]) for n in names}
        rows = {**by_name, f"{names[0]} - {names[1]}": by_name[names[0]] - by_name[names[1]]}
        for name, values in rows.items():
            each = ", ".join(f"{value:.2f}" for value in values)
            lines.append(f"| {model.removeprefix('builtin:')} | {name} | {each} | {student_t(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
