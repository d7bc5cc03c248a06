"""Every algorithm that learns from rewards on one task, from one warm start, with equal numbers of answers.

    python -m benchmarks.algorithms --seeds 0 1 2 --out runs/algorithms

The quickstart is trained up to the end of its warm start, once a seed. From there each algorithm, with its defaults but
for the learning rate, gets `--steps` steps of 256 answers. Prints a Markdown table: accuracy on the test problems after
equal answers, the seconds that took, and the validation accuracy after as many seconds as the fastest one needed.
Writes results.json and a picture for each algorithm's page (curves by seed, their mean with its interval).
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quickstart import RECIPE, end_of_warm_start
from benchmarks.training import train
from lmgym.stats.intervals import mean_interval

ANSWERS = 256  # of a step
RATE = 3e-4  # the quickstart's; critics learn ten times as fast
GROUPS = {"group_size": 8}
# Each with the prompts of a step, so that a step has 256 answers.
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: GROUPS for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "rloo", "raft", "replay")},
    "reinforce": {"group_size": 1},
    "reinforce_pp": {"group_size": 1},
    "reinforce_stable": {"group_size": 1},
    **{name: {} for name in ("ppo", "a2c", "nlpo", "trpo")},
}


def recipe_of(name: str, start: Path, steps: int, every: int) -> dict[str, Any]:
    """The quickstart's last stage with another algorithm, from a model folder."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    stage = recipe.pop("stages")[-1]
    del stage["name"]
    fields = ALGORITHMS[name]
    rates = {"learning_rate": RATE, **({"critic_learning_rate": 10 * RATE} if not fields else {})}
    recipe |= stage | {
        "algorithm": {"name": name, **fields},
        "optimizer": rates,
        "prompts_per_step": ANSWERS // fields.get("group_size", 1),
        "steps": steps,
        "threads": 1,
    }
    recipe["policy"] |= {"model": str(start)}
    recipe["evaluation"] |= {"every": every}
    return recipe


def one_run(name: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train one algorithm with one seed: its evaluations, each with the seconds of training before it."""
    run = given.out / f"{name}-{seed}"
    path = given.out / f"{name}-{seed}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(name, start, given.steps, given.every)), encoding="utf-8")
    if not (run / "summary.json").exists():
        train(path, [f"seed={seed}", f"out={run}"])
    seconds, curve, test = 0.0, [], None
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "train":
            seconds += record["seconds"]
        elif record["kind"] == "evaluation" and record["split"] == "validation":
            curve.append({"step": record["step"], "seconds": seconds, "accuracy": record["final_answer"]})
        elif record["kind"] == "evaluation":
            test = record["final_answer"]
    print(f"{name} seed {seed}: {curve[0]['accuracy']:.3f} to {test:.3f} in {seconds:.0f} s", flush=True)
    return {"algorithm": name, "seed": seed, "curve": curve, "test": test, "seconds": seconds}


def after(curve: Sequence[dict[str, Any]], seconds: float) -> float:
    """The accuracy at the last evaluation that came within so many seconds."""
    return [point["accuracy"] for point in curve if point["seconds"] <= seconds][-1]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, the best first."""
    names = {
        result["algorithm"]: [one for one in results if one["algorithm"] == result["algorithm"]] for result in results
    }
    shortest = min(statistics.mean(one["seconds"] for one in own) for own in names.values())
    rows = []
    for name, own in names.items():
        mean = mean_interval([[one["test"]] for one in own])
        seconds = statistics.mean(one["seconds"] for one in own)
        equal = statistics.mean(after(one["curve"], shortest) for one in own)
        rows.append((mean.mean, f"| {name} | {mean} | {seconds:.0f} | {equal:.3f} |"))
    head = f"| algorithm | after equal answers [95%] | seconds | after {shortest:.0f} s |\n|---|---|---|---|"
    return "\n".join([head, *(row for _, row in sorted(rows, reverse=True))])


def draw(name: str, results: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation accuracy over answers: each seed, and the mean with its interval."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    answers = [point["step"] * ANSWERS for point in results[0]["curve"]]
    curves = [[point["accuracy"] for point in one["curve"]] for one in results]
    for curve in curves:
        axes.plot(answers, curve, color="#0072b2", alpha=0.3, linewidth=1)
    bands = [mean_interval([[value] for value in values]) for values in zip(*curves, strict=True)]
    axes.plot(answers, [band.mean for band in bands], color="#0072b2", linewidth=2.5)
    lows = [max(band.low, 0.0) if band.low is not None else band.mean for band in bands]
    highs = [min(band.high, 1.0) if band.high is not None else band.mean for band in bands]
    axes.fill_between(answers, lows, highs, color="#0072b2", alpha=0.12, linewidth=0)
    axes.set(title=name, xlabel="sampled answers", ylabel="accuracy, unseen numbers", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    starts = {}
    for seed in given.seeds:
        run = given.out / f"start-{seed}"
        if not (run / "summary.json").exists():
            train(RECIPE, [f"seed={seed}", f"out={run}", "stages.rl.steps=1", "checkpoint.keep=1000", "threads=1"])
        starts[seed] = end_of_warm_start(run)
    with ThreadPoolExecutor(given.workers) as pool:
        pending = [pool.submit(one_run, name, seed, starts[seed], given) for name in given.only for seed in given.seeds]
        results = [future.result() for future in pending]
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    for name in given.only:
        draw(name, [one for one in results if one["algorithm"] == name], given.out / f"{name}.png")


if __name__ == "__main__":
    main()
