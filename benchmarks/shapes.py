"""The recipe `shapes` by seeds: how often a tiny model that sees, made from scratch, counts drawn shapes right.

    python -m benchmarks.shapes --seeds 0 1 2 --out runs/shapes
    python -m benchmarks.shapes --seeds 0 1 2 --out runs/shapes --picture docs/pictures/shapes.png

Runs that are in the folder already are only read. Prints a Markdown table: answers to the test split, sampled as in
training, at the beginning and the end of the last stage, and the minutes of the whole command; and what the best guess
would reach that reads the question and sees no picture. Draws the answers to the validation split over the steps.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.algorithms import draw_curves
from benchmarks.training import train
from lmgym.config.build import load_config
from lmgym.stats.intervals import mean_interval
from lmgym.training.setup import held_out_examples, training_examples

RECIPE = Path(__file__).parents[1] / "lmgym/recipes/shapes.yaml"
REWARD = "exact_match"


def one_seed(seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train with a seed, unless that was done; the curve, what the test says, and the minutes."""
    run, times = given.out / f"seed-{seed}", given.out / f"seed-{seed}.json"
    if not times.exists():
        settings = [f"seed={seed}", f"out={run}", f"threads={given.threads}", *given.settings]
        times.write_text(json.dumps(train(RECIPE, settings)), encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    before, after = (summary[moment]["results"][REWARD]["mean"] for moment in ("before", "after"))
    minutes = json.loads(times.read_text(encoding="utf-8")) / 60
    return {"seed": seed, "before": before, "after": after, "minutes": minutes, "curve": curve(run)}


def curve(run: Path) -> list[dict[str, Any]]:
    """The evaluations on the validation split of a run, each after so many steps of all stages together."""
    steps, found = 0, list[dict[str, Any]]()
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "train":
            steps += 1
        elif record["split"] == "validation":
            found.append({"steps": steps, "accuracy": record[REWARD], "stage": record["stage_name"]})
    return found


def blind_guess() -> float:
    """The share of the test split that is right if each question gets the answer that it has most often in training."""
    config = load_config(RECIPE, ["evaluation.split=test"])
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for example in training_examples(config, config.stages[-1]):
        answers[example.meta["question"]][example.meta["answer"]] += 1
    test = held_out_examples(config)
    right = [answers[one.meta["question"]].most_common(1)[0][0] == one.meta["answer"] for one in test]
    return sum(right) / len(right)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line a seed, and the means with their 95 % intervals over the seeds."""
    lines = ["| seed | after examples | after GRPO | minutes |", "|---|---|---|---|"]
    for one in results:
        lines.append(f"| {one['seed']} | {one['before']:.3f} | {one['after']:.3f} | {one['minutes']:.1f} |")
    means = [mean_interval([[one[moment]] for one in results]) for moment in ("before", "after")]
    gain = mean_interval([[one["after"] - one["before"]] for one in results])
    lines.append(f"| mean [95 %] | {means[0]} | {means[1]} | gain {gain} |")
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], blind: float, path: Path) -> None:
    """Accuracy over steps: a thin line a seed, a thick one for the mean, with its interval."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    draw_curves(axes, results, over="steps")
    points = results[0]["curve"]
    begun = next(point["steps"] for point in points if point["stage"] != points[0]["stage"])
    axes.axvline(begun, color="0.5", linewidth=1, linestyle=":")
    axes.axhline(blind, color="0.5", linewidth=1, linestyle="--")
    axes.annotate("examples", (begun, 0.02), (-6, 0), textcoords="offset points", ha="right", color="0.4")
    axes.annotate("GRPO", (begun, 0.02), (6, 0), textcoords="offset points", color="0.4")
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    axes.annotate("best guess without the picture", (1, blind), (-4, -12), color="0.4", **place)
    axes.set(xlabel="steps", ylabel="right answers, unseen pictures, sampled", ylim=(0, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--workers", type=int, default=2, help="runs side by side (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a run (%(default)s)")
    parser.add_argument("--picture", type=Path, help="where the curve goes (shapes.png in the folder)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="overrides of the recipe")
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.workers) as pool:
        results = list(pool.map(lambda seed: one_seed(seed, given), given.seeds))
    blind = blind_guess()
    print(f"{table(results)}\n\nBest guess without the picture: {blind:.3f}")
    draw(results, blind, given.picture or given.out / "shapes.png")


if __name__ == "__main__":
    main()
