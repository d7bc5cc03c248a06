"""The policy-gradient family on arithmetic word problems: held-out accuracy after equally many sampled answers.

python -m benchmarks.family                                                     all contenders, seeds 10, 11 and 12
python -m benchmarks.family --only grpo rloo --seeds 0 evaluation.split=validation       while choosing settings

Every contender begins from the same model: the first stage of lmgym/recipes/llm_rl_miniature.yaml, trained once a
seed. Then each takes equally many answers to the same prompts in the same order, with one learning rate and one size
of group. What has a ratio takes MINIBATCHES optimizer steps on the answers of a step, what has none takes one. Each
run is one process of one thread, `--jobs` of them side by side. Share of right ones among sampled answers to test
problems, which are asked before the first step and after the last: 95% interval over problems for a run,
Student's t for a mean over seeds.
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
from lmgym.config.yaml import read_yaml, write_yaml
from lmgym.stats.intervals import student_t

RECIPE = ROOT / "lmgym" / "recipes" / "llm_rl_miniature.yaml"
METRIC = "final_answer"
MINIBATCHES = 4
RATIO = {"minibatches": MINIBATCHES}
CONTENDERS: dict[str, dict[str, Any]] = {
    "reinforce, no baseline": {"name": "reinforce", "baseline": "none"},
    "reinforce, mean": {"name": "reinforce", "baseline": "mean"},
    "reinforce, ema": {"name": "reinforce", "baseline": "ema"},
    "reinforce, scst": {"name": "reinforce", "baseline": "scst"},
    "rloo": {"name": "rloo"},
    "reinforce_pp": {"name": "reinforce_pp", **RATIO},
    "reinforce_pp, baseline": {"name": "reinforce_pp", "preset": "baseline", **RATIO},
    "reinforce_stable": {"name": "reinforce_stable", "baseline": "group"},
    "grpo": {"name": "grpo", **RATIO},
    "dr_grpo": {"name": "dr_grpo", **RATIO},
    "dapo": {"name": "dapo", **RATIO},
    "gspo": {"name": "gspo", **RATIO},
    "cispo": {"name": "cispo", **RATIO},
    "sapo": {"name": "sapo", **RATIO},
    "dppo": {"name": "dppo", **RATIO},
}
MORE = {"dapo": ["max_draws=1"]}  # so that it has no more answers than the others; it leaves equal groups out


@dataclass(frozen=True)
class Outcome:
    """One run: the metric's mean and interval before and after, answers sampled, seconds of the whole process."""

    contender: str
    seed: int
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    answers: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(name)
        warm, rl = recipes(folder, arguments.steps)
        list(pool.map(lambda seed: train(warm, [f"seed={seed}", f"out={folder / f'warm-{seed}'}"]), arguments.seeds))
        wanted = [(contender, seed) for contender in arguments.only for seed in arguments.seeds]
        outcomes = list(pool.map(lambda one: run(rl, folder, *one, arguments.overrides), wanted))
    print(table(outcomes))


def recipes(folder: Path, steps: int) -> tuple[Path, Path]:
    """The recipe's two stages as a recipe each."""
    tree = read_yaml(RECIPE)
    stages = [{key: value for key, value in stage.items() if key != "name"} for stage in tree.pop("stages")]
    held_out = {**tree["evaluation"], "split": "test", "final_split": None, "every": 0}
    tree |= {"evaluation": held_out, "logs": {"samples": 0}}
    policy = {key: value for key, value in tree["policy"].items() if key != "architecture"}
    warm = {**tree, **stages[0], "task": {**tree["task"], **stages[0]["task"]}}
    rl = {**tree, **stages[1], "policy": policy, "steps": steps}
    paths = folder / "warm.yaml", folder / "rl.yaml"
    for path, one in zip(paths, (warm, rl), strict=True):
        path.write_text(write_yaml(one))
    return paths


def run(recipe: Path, folder: Path, contender: str, seed: int, overrides: Sequence[str]) -> Outcome:
    """One contender from the warm model of its seed."""
    out = folder / f"{len(list(folder.iterdir()))}-{contender}-{seed}".replace(", ", "-").replace(" ", "-")
    algorithm = {"group_size": 8, **CONTENDERS[contender]}
    settings = [
        f"seed={seed}",
        f"out={out}",
        f"policy.model={folder / f'warm-{seed}' / 'final'}",
        f"algorithm={json.dumps(algorithm)}",
        *MORE.get(contender, []),
        *overrides,
    ]
    seconds = train(recipe, settings)
    summary = json.loads((out / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = sum(record["kind"] == "train" for record in records)
    before, after = (summary[moment]["results"][METRIC] for moment in ("before", "after"))
    answers = steps * read_yaml(recipe)["prompts_per_step"] * algorithm["group_size"]
    outcome = Outcome(contender, seed, bounds(before), bounds(after), answers, seconds)
    print(outcome, file=sys.stderr, flush=True)
    return outcome


def bounds(result: dict[str, Any]) -> tuple[float, float, float]:
    """Mean and interval of an evaluation in summary.json."""
    return result["mean"], result["low"], result["high"]


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per contender, the best mean first."""
    by_name = {
        name: [o for o in outcomes if o.contender == name] for name in dict.fromkeys(o.contender for o in outcomes)
    }
    seeds = [o.seed for o in next(iter(by_name.values()))]
    lines = [
        f"| contender | mean over seeds [95 %] | {' | '.join(f'seed {seed} [95 %]' for seed in seeds)} | seconds |",
        "|---|---|" + "---|" * len(seeds) + "---|",
    ]
    first = next(iter(by_name.values()))
    lines.append(row("(before)", [o.before for o in first], ""))
    for name, own in sorted(by_name.items(), key=lambda item: -np.mean([o.after[0] for o in item[1]])):
        lines.append(row(name, [o.after for o in own], f"{np.median([o.seconds for o in own]):.0f}"))
    lines.append(f"\n{first[0].answers:,} answers each.")
    return "\n".join(lines)


def row(name: str, results: Sequence[tuple[float, float, float]], seconds: str) -> str:
    """A line of the table."""
    over_seeds = student_t([mean for mean, _, _ in results])
    cells = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in results]
    return f"| {name} | {over_seeds} | {' | '.join(cells)} | {seconds} |"


if __name__ == "__main__":
    main()
