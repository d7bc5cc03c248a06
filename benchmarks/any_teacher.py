"""A teacher with another tokenizer beside one with the student's: held-out accuracy at equal seconds of training.

    python -m benchmarks.any_teacher --student SmolLM2-135M-Instruct \\
        --teachers other=gemma-3-270m same=SmolLM2-135M-Instruct --prepare 100 --seeds 0 1 2 --out runs/any_teacher

Each name before a = is an arm: gkd with that teacher, on the student's own answers to word problems of one step. All
arms have the same students, prompts and learning rate; the rewards are measured only. A teacher that solves fewer
problems than the student teaches nothing, so each teacher is evaluated first, and its accuracy stands in the table.
With --prepare each of them first imitates the worked answers of the training split for so many steps, so that a small
model, and the student's own, become teachers of the task; what that takes is in no arm's seconds. The students have the
same prompts, and never see these answers.

Accuracy at equal seconds is read off between two evaluations of 200 greedy answers, at the end of the fastest arm of
the seed. Prints a table; writes results.json and picture.png.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training import train
from lmgym.stats.intervals import student_t

METRIC = "final_answer"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of Okabe and Ito: also for the colour-blind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True, help="a folder or a name on the Hub")
    parser.add_argument("--teachers", required=True, nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--divergence", default="reverse_kl", choices=["reverse_kl", "forward_kl", "jsd"])
    parser.add_argument("--prepare", type=int, default=0, metavar="STEPS", help="teach the teachers first")
    parser.add_argument("--prepare-rate", type=float, default=1e-4, help="their learning rate (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate (%(default)s)")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations (%(default)s)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of the recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/any_teacher"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    teachers = dict(pair.split("=", 1) for pair in given.teachers)
    if given.prepare:
        teachers = {name: prepared(name, model, given) for name, model in teachers.items()}
    known = {name: accuracy_of(name, model, given) for name, model in teachers.items()}
    runs = []
    for seed in given.seeds:  # seed by seed: what the machine does in an hour falls on all arms
        for name, model in teachers.items():
            runs.append(one_run(name, model, seed, given))
            (given.out / "results.json").write_text(json.dumps({"teachers": known, "runs": runs}, indent=1))
            print(f"{name}, seed {seed}: {runs[-1]['accuracy']}", flush=True)
    print(table(runs, known))
    draw(runs, given.out / "picture.png")


def recipe(policy: str, algorithm: Mapping[str, Any], steps: int, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "task": {"name": "arithmetic", "style": "short", "system_prompt": "Answer with the number alone."},
        "rewards": {METRIC: 1.0},
        "policy": {"model": policy},
        "sampling": {"max_new_tokens": 24},
        "algorithm": algorithm,
        "optimizer": {"learning_rate": given.rate},
        "prompts_per_step": 16,
        "steps": steps,
        "evaluation": {"split": "validation", "examples": 200, "temperature": 0.0, "every": given.every},
        "checkpoint": {"every": 0},
    }


def records_of(
    name: str, tree: Mapping[str, Any], given: argparse.Namespace, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Train a recipe from the beginning; returns the records of its metrics.jsonl."""
    folder, path = given.out / name, given.out / f"{name}.yaml"
    shutil.rmtree(folder, ignore_errors=True)
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    train(path, [f"out={folder.absolute()}", *settings, *given.set])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def prepared(name: str, model: str, given: argparse.Namespace) -> str:
    """The folder of a teacher that has imitated the training split's answers: one for all seeds of the students."""
    tree = recipe(model, {"name": "supervised"}, given.prepare, given)
    tree |= {"optimizer": {"learning_rate": given.prepare_rate}, "evaluation": {**tree["evaluation"], "every": 0}}
    records_of(f"prepared-{name}", tree, given, [])
    return str((given.out / f"prepared-{name}" / "final").absolute())


def accuracy_of(name: str, model: str, given: argparse.Namespace) -> float:
    """The teacher's own accuracy: the evaluation before the first step of a run that it would begin."""
    tree = recipe(model, {"name": "grpo", "group_size": 2}, 1, given)
    rows = records_of(f"teacher-{name}", tree, given, ["prompts_per_step=1", "optimizer.learning_rate=0"])
    return next(float(row[METRIC]) for row in rows if row["kind"] != "train" and row.get("split") == "validation")


def one_run(name: str, model: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One arm. The curve: accuracy at each evaluation, and the seconds of the steps before it (no evaluations)."""
    algorithm = {"name": "gkd", "teacher": model, "divergence": given.divergence}
    rows = records_of(
        f"{name}-seed-{seed}", recipe(given.student, algorithm, given.steps, given), given, [f"seed={seed}"]
    )
    curve: dict[str, Any] = {"arm": name, "seed": seed, "seconds": [], "accuracy": [], "divergence": [], "single": []}
    seconds = 0.0
    for row in rows:
        if row["kind"] == "train":
            seconds += row["seconds"]
            curve["divergence"].append(row["loss/divergence"])
            curve["single"].append(row.get("spans/single", 1.0))
        elif row["split"] == "validation":
            curve["seconds"].append(seconds)
            curve["accuracy"].append(row[METRIC])
    return curve


def table(runs: Sequence[Mapping[str, Any]], teachers: Mapping[str, float]) -> str:
    """Markdown: each arm's accuracy before, after all steps, and after the seconds of the seed's fastest arm."""
    seeds = {run["seed"] for run in runs}
    shortest = {seed: min(run["seconds"][-1] for run in runs if run["seed"] == seed) for seed in seeds}
    lines = [
        "| teacher | its accuracy | before | at equal seconds, each seed | mean [95%] | after all steps "
        "| seconds a step | spans of one token |",
        "|---" * 8 + "|",
    ]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        equal = [float(np.interp(shortest[run["seed"]], run["seconds"], run["accuracy"])) for run in own]
        found = student_t(equal) if len(equal) > 1 else None
        mean = "" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
        before, after = (np.mean([run["accuracy"][place] for run in own]) for place in (0, -1))
        pace = np.mean([run["seconds"][-1] / len(run["divergence"]) for run in own])
        single = np.mean([np.mean(run["single"]) for run in own])
        each = ", ".join(f"{value:.3f}" for value in equal)
        cells = f"{teachers[arm]:.3f}", f"{before:.3f}", each, mean, f"{after:.3f}", f"{pace:.1f}", f"{single:.2f}"
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out accuracy over seconds, a line a run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    for arm, colour in zip(dict.fromkeys(run["arm"] for run in runs), COLOURS, strict=False):
        for number, run in enumerate(run for run in runs if run["arm"] == arm):
            axes.plot(run["seconds"], run["accuracy"], color=colour, alpha=0.8, label=None if number else arm)
    axes.set(xlabel="seconds of training", ylabel="accuracy on held-out problems, greedy", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
