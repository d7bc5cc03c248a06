"""Learning per second by precision: steps and seconds until a held-out accuracy is reached.

    python -m benchmarks.precision --model SmolLM2-135M-Instruct --seeds 0 1 2 3 --out runs/precision

Word problems of one step, answered by a pretrained model that hears only whether its number was right. Each form of
precision trains from the same weights on the same prompts, and stops at the target. The point where a curve crosses it
is read off between two evaluations of 200 greedy answers. Prints a table; writes results.json and picture.png.
"""

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training import train
from lmgym.stats.intervals import student_t

FORMS = {  # keys of `policy`
    "bf16, stochastic": {"compute": "bfloat16", "rounding": "stochastic"},
    "bf16, nearest": {"compute": "bfloat16", "rounding": "nearest"},
    "fp32": {"compute": "float32"},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # of Okabe and Ito: also for the colour-blind
METRIC = "final_answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a name on the Hub")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate (%(default)s)")
    parser.add_argument("--target", type=float, default=0.7, help="held-out accuracy to reach (%(default)s)")
    parser.add_argument("--steps", type=int, default=160, help="where a run ends without it (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations (%(default)s)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of the recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in given.seeds:  # seed by seed: what the machine does in an hour falls on all forms
        for form in given.forms:
            runs.append(one_run(form, seed, given))
            (given.out / "results.json").write_text(json.dumps(runs, indent=1), encoding="utf-8")
            print(f"{form}, seed {seed}: {runs[-1]['accuracy']}", flush=True)
    print(table(runs, given.target))
    draw(runs, given.target, given.out / "picture.png")


def recipe(form: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "task": {"name": "arithmetic", "style": "short", "system_prompt": "Answer with the number alone."},
        "rewards": {METRIC: 1.0},
        "policy": {"model": given.model, **FORMS[form]},
        "sampling": {"max_new_tokens": 24},
        "algorithm": {"name": "grpo", "group_size": 8},
        "optimizer": {"learning_rate": given.rate},
        "prompts_per_step": 8,
        "steps": given.steps,
        "seed": seed,
        "evaluation": {"split": "validation", "examples": 200, "temperature": 0.0, "every": given.every},
        "early_stop": {"metric": METRIC, "target": given.target},
        "checkpoint": {"every": 0},
    }


def one_run(form: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train once. The curve: accuracy at each evaluation, and the seconds of the steps before it (no evaluations)."""
    folder = given.out / f"{form.replace(', ', '-')}-seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    path = given.out / "recipe.yaml"
    path.write_text(json.dumps(recipe(form, seed, given)), encoding="utf-8")  # JSON is YAML
    train(path, [f"out={folder.absolute()}", *given.set])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve: dict[str, Any] = {"form": form, "seed": seed, "steps": [], "seconds": [], "accuracy": [], "reward": []}
    seconds = 0.0
    for row in rows:
        if row["kind"] == "train":
            seconds += row["seconds"]
            curve["reward"].append(row["reward"])
        elif row["split"] == "validation":
            curve["steps"].append(row["step"])
            curve["seconds"].append(seconds)
            curve["accuracy"].append(row[METRIC])
    return curve


def reached(along: Sequence[float], accuracy: Sequence[float], target: float) -> float:
    """Where the curve first crosses the target, on a straight line between two evaluations; infinite if it never does.

    Example: reached([0, 10, 20], [0.1, 0.6, 0.8], 0.7) == 15.0"""
    before = (along[0], accuracy[0])
    for point in zip(along, accuracy, strict=True):
        if point[1] >= target:
            rise = point[1] - before[1]
            return point[0] if rise == 0 else before[0] + (point[0] - before[0]) * (target - before[1]) / rise
        before = point
    return math.inf


def table(runs: Sequence[Mapping[str, Any]], target: float) -> str:
    """Markdown: steps and seconds to the target by form, and each form's steps as a share of fp32's, paired by seed."""
    steps = {(run["form"], run["seed"]): reached(run["steps"], run["accuracy"], target) for run in runs}
    lines = [
        f"| | steps to {target} by seed | mean | as a share of fp32's | seconds to {target} | seconds a step |",
        "|---" * 6 + "|",
    ]
    for form in dict.fromkeys(run["form"] for run in runs):
        own = [run for run in runs if run["form"] == form]
        each = [steps[form, run["seed"]] for run in own]
        clock = [reached(run["seconds"], run["accuracy"], target) for run in own]
        pace = statistics.median(run["seconds"][-1] / run["steps"][-1] for run in own)
        shares = [
            steps[form, run["seed"]] / steps["fp32", run["seed"]] for run in own if ("fp32", run["seed"]) in steps
        ]
        cells = (form, ", ".join(f"{value:.0f}" for value in each), f"{statistics.mean(each):.0f}", ratio(shares))
        lines.append(f"| {' | '.join(cells)} | {statistics.mean(clock):.0f} | {pace:.1f} |")
    return "\n".join(lines)


def ratio(shares: Sequence[float]) -> str:
    """The geometric mean of paired ratios, with a 95 % interval (Student's t of the logarithms)."""
    logs = [math.log(share) for share in shares]
    if len(logs) < 2 or not all(map(math.isfinite, logs)):
        return ""
    interval = student_t(logs)
    return f"{math.exp(interval.mean):.2f} [{math.exp(interval.low):.2f}, {math.exp(interval.high):.2f}]"


def draw(runs: Sequence[Mapping[str, Any]], target: float, path: Path) -> None:
    """Held-out accuracy over steps and over seconds, a line a run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for form, colour in zip(dict.fromkeys(run["form"] for run in runs), COLOURS, strict=False):
        for number, run in enumerate(run for run in runs if run["form"] == form):
            for axes, along in zip(panels, ("steps", "seconds"), strict=True):
                label = form if not number else None
                axes.plot(run[along], run["accuracy"], color=colour, alpha=0.8, label=label)
    for axes, along in zip(panels, ("steps", "seconds of training"), strict=True):
        axes.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel=along)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="accuracy on held-out problems, greedy", ylim=(0, 1))
    panels[1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
