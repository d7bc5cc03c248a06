"""The chain in miniature: gold reward, pairs, a reward model, PPO against it, DPO on the same pairs (docs/chain.md).

    python -m benchmarks.chain                                    seeds 0 1 2, about five minutes each on one core
    python -m benchmarks.chain --picture docs/pictures/chain.png

Runs the recipes chain_pairs, chain_reward_model, chain_ppo and chain_dpo, each seed with a policy, pairs and a reward
model of its own. Runs that are complete are not repeated. Prints Markdown tables, writes results.json, and draws
gold reward and the reward model's score over the KL to the first policy: of PPO at each step, of DPO at its
checkpoints, and of best-of-n by the reward model without any training.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.training import ROOT, train
from lmgym.stats.intervals import Interval, student_t

RECIPES = ROOT / "lmgym" / "recipes"
GOLD, MODEL = "increasing_numbers", "reward_model"
PARTS = {"gold": GOLD, "model": MODEL}
COLOURS = {"PPO": "#d55e00", "DPO": "#0072b2", "best of n": "#009e73"}
LARGEST_CHOICE = 16  # best-of-n is computed from 64 answers a prompt: a larger n would rest on a few of them
WINDOW = 5  # steps of PPO in a point of its curve: 640 answers, as many as a measured checkpoint has
Record = dict[str, Any]
Point = dict[str, float]  # kl, gold, model, and the step


def records(run: Path, kind: str, split: str | None = None) -> list[Record]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind and one.get("split") == split]


def once(recipe: Path, run: Path, settings: Sequence[str]) -> Path:
    """Train a recipe into a folder, unless it is there and complete."""
    if not (run / "summary.json").exists():
        train(recipe, [f"out={run}", *settings])
    return run


def chain(seed: int, out: Path, settings: Sequence[str]) -> Record:
    """One seed: all runs of the chain, and what is drawn of them."""
    names = ("pairs", "reward_model", "ppo", "dpo")
    runs = {name: out / f"seed-{seed}" / name for name in names}
    start, own = f"policy.model={runs['pairs'] / 'final'}", [f"seed={seed}", *settings]
    pairs, judge = f"task.path={runs['pairs']}", f"rewards.{MODEL}.model={runs['reward_model']}"
    inputs = {"pairs": [], "reward_model": [start, pairs], "ppo": [start, judge], "dpo": [start, pairs, judge]}
    for name in names:
        once(RECIPES / f"chain_{name}.yaml", runs[name], [*own, *inputs[name]])
        print(f"seed {seed}: {name}", flush=True)
    result = {
        "seed": seed,
        "reward model": held_out(runs["reward_model"]),
        "curves": {"PPO": ppo_curve(runs["ppo"]), "DPO": dpo_curve(runs, seed), "best of n": best_of_n(runs["ppo"])},
        "evaluations": {"PPO": evaluations(runs["ppo"]), "DPO": evaluations(runs["dpo"])},
    }
    print(f"seed {seed}: measured", flush=True)
    return result


def held_out(run: Path) -> Record:
    """How many held-out pairs the reward model orders as gold does, at the end of its training."""
    last = records(run, "evaluation", "validation")[-1]
    keys = [f"preference/accuracy{end}" for end in ("", "/low", "/high")]
    return {"accuracy": [last[key] for key in keys], "calibration": last["calibration/error"], "pairs": last["count"]}


def ppo_curve(run: Path) -> list[Point]:
    """Means over a few steps each, of the answers that PPO sampled. KL in nats per answer."""
    steps = records(run, "train")
    return [mean_point(steps[first : first + WINDOW], "kl/reference") for first in range(0, len(steps), WINDOW)]


def mean_point(steps: Sequence[Record], kl: str) -> Point:
    """The KL of a record is a mean over tokens: times the mean length it is the KL of whole answers."""
    read: dict[str, Callable[[Record], float]] = {
        "kl": lambda one: one[kl] * one["length/mean"],
        "gold": lambda one: one[f"reward/{GOLD}"],
        "model": lambda one: one[f"reward/{MODEL}"],
        "step": lambda one: one["step"],
    }
    return {name: statistics.mean(map(value, steps)) for name, value in read.items()}


def dpo_curve(runs: dict[str, Path], seed: int) -> list[Point]:
    """DPO samples nothing, so its checkpoints are measured afterwards."""
    first, found = runs["pairs"] / "final", []
    for checkpoint in [first, *sorted((runs["dpo"] / "checkpoints").glob("stage-0-step-*"))]:
        step = 0 if checkpoint == first else int(checkpoint.name.rsplit("-", 1)[-1])
        point = measured(checkpoint, runs, runs["dpo"].parent / f"measured-{step}", seed)
        found.append({**point, "step": step})
    return found


def measured(model: Path, runs: dict[str, Path], run: Path, seed: int) -> Point:
    """Gold, score and KL of 640 answers of a model: a step of distillation from the first policy, whose learning rate
    is 0, reports them all."""
    recipe = yaml.safe_load((RECIPES / "chain_ppo.yaml").read_text(encoding="utf-8"))
    recipe |= {
        "policy": {"model": str(model), "device": "cpu"},
        "rewards": {MODEL: {"model": str(runs["reward_model"])}, GOLD: 0},
        "algorithm": {"name": "distill", "teacher": str(runs["pairs"] / "final")},
        "optimizer": {"learning_rate": 0.0},
        "evaluation": {"every": 0, "examples": 1},
        "prompts_per_step": 640,
        "steps": 1,
    }
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return mean_point(records(once(path, run, [f"seed={seed}"]), "train"), "kl/teacher")


def best_of_n(run: Path) -> list[Point]:
    """The reward model picks the best of n answers of the first policy. The KL is at most log n - (n - 1) / n."""
    first = records(run, "evaluation", "validation")[0]
    sizes = sorted(int(key.rsplit("@", 1)[1]) for key in first if key.startswith(f"{GOLD}/best@") and key[-1].isdigit())
    sizes = [n for n in sizes if n <= LARGEST_CHOICE]
    more = [point_at(first, f"/best@{n}", kl=math.log(n) - (n - 1) / n, step=n) for n in sizes]
    return [point_at(first, kl=0.0, step=1), *more]


def point_at(record: Record, suffix: str = "", **more: float) -> Point:
    return {"gold": record[GOLD + suffix], "model": record[MODEL + suffix], **more}


def evaluations(run: Path) -> list[Point]:
    """Gold and score of answers to held-out prompts, with their intervals over prompts."""
    ends = {f"{key} {end}": f"{name}/{end}" for key, name in PARTS.items() for end in ("low", "high")}
    return [
        point_at(one, step=one["step"], **{key: one[name] for key, name in ends.items()})
        for one in records(run, "evaluation", "validation")
    ]


def at_peak(result: Record, name: str) -> Point:
    """The evaluation where gold is highest. The step is chosen by other answers, those of the curve: the best of
    several noisy numbers is too high by chance, a fresh number at the same step is not."""
    curve = result["curves"][name]

    def gold_near(one: Point) -> float:
        return min(curve, key=lambda point: abs(point["step"] - one["step"]))["gold"]

    return max(result["evaluations"][name], key=gold_near)


def interval(values: Sequence[float]) -> Interval:
    return student_t(list(values))


def table_of_seeds(results: Sequence[Record]) -> str:
    """Markdown: how good each seed's reward model is, and what became of gold under PPO."""
    lines = [
        "| seed | held-out pairs in gold's order | gold: before | PPO, where it is highest | PPO, at the end |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        mean, low, high = one["reward model"]["accuracy"]
        places = (one["evaluations"]["PPO"][0], at_peak(one, "PPO"), one["evaluations"]["PPO"][-1])
        cells = [f"{place['gold']:.3f} [{place['gold low']:.3f}, {place['gold high']:.3f}]" for place in places]
        lines.append(f"| {one['seed']} | {mean:.3f} [{low:.3f}, {high:.3f}] | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(results: Sequence[Record]) -> str:
    """Markdown: means over seeds with Student's t interval, before, where gold is highest, and at the end."""
    lines = ["| | KL, nats an answer | gold reward [95%] | the model's score [95%] |", "|---|---|---|---|"]

    def row(name: str, points: Sequence[Point], kls: Sequence[float] | None) -> None:
        cells = [interval([point[key] for point in points]) for key in ("gold", "model")]
        distance = f"{min(kls):.1f} to {max(kls):.1f}" if kls else "0"
        lines.append(f"| {name} | {distance} | {cells[0]} | {cells[1]} |")

    row("before", [one["evaluations"]["PPO"][0] for one in results], None)
    best = [one["curves"]["best of n"][-1] for one in results]
    row(f"best of {best[0]['step']:.0f}", best, [point["kl"] for point in best])
    for name in ("PPO", "DPO"):
        for place, points in {
            "where gold is highest": [at_peak(one, name) for one in results],
            "at the end": [one["evaluations"][name][-1] for one in results],
        }.items():
            pairs = zip(results, points, strict=True)
            row(f"{name}, {place}", points, [kl_at(one["curves"][name], point["step"]) for one, point in pairs])
    return "\n".join(lines)


def kl_at(curve: Sequence[Point], step: float) -> float:
    return min(curve, key=lambda point: abs(point["step"] - step))["kl"]


def changes(results: Sequence[Record]) -> str:
    """Markdown: what gold gains up to its highest place and loses after it, seed by seed."""
    lines = ["| | gold: highest less before [95%] | end less highest [95%] |", "|---|---|---|"]
    for name in ("PPO", "DPO"):
        places = [(one["evaluations"][name][0], at_peak(one, name), one["evaluations"][name][-1]) for one in results]
        cells = []
        for before, after in ((0, 1), (1, 2)):
            values = [place[after]["gold"] - place[before]["gold"] for place in places]
            cells.append(f"{interval(values)} ({', '.join(f'{value:+.3f}' for value in values)})")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def draw(results: Sequence[Record], path: Path) -> None:
    """Two panels over the KL: gold, and the score that PPO is paid by. Thin: each seed; thick: means at equal steps;
    bars: a seed's answers to held-out prompts, with their interval over prompts."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axes, key, title in zip(panels, ("gold", "model"), ("gold reward", "the reward model's score"), strict=True):
        for name, colour in COLOURS.items():
            curves = [one["curves"][name] for one in results]
            for curve in curves:
                axes.plot(*columns(curve, key), color=colour, alpha=0.35, linewidth=1)
            for one in results:
                bars(axes, one["curves"][name], one["evaluations"].get(name, []), key, colour)
            middle = [mean_of(points) for points in zip(*curves, strict=True)]
            label = f"{name}, n up to {LARGEST_CHOICE}" if name == "best of n" else name
            axes.plot(*columns(middle, key), color=colour, linewidth=2.5, label=label)
        # The root of the KL, as in arXiv 2210.10760: small distances, where gold rises, get room.
        axes.set_xscale("function", functions=(lambda kl: kl.clip(0) ** 0.5, lambda root: root**2))
        axes.set(title=title, xlabel="KL to the first policy, nats an answer (root scale)", xlim=(0, None))
        axes.set_xticks([tick for tick in (0, 1, 2, 5, 10, 20, 30, 50) if tick <= axes.get_xlim()[1]])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def bars(axes: Any, curve: Sequence[Point], measured_at: Sequence[Point], key: str, colour: str) -> None:
    """An interval wherever a seed was evaluated, at the KL that its curve has there."""
    places = [max(kl_at(curve, point["step"]), 0.0) if point["step"] else 0.0 for point in measured_at]
    for place, point in zip(places, measured_at, strict=True):
        axes.vlines(place, point[f"{key} low"], point[f"{key} high"], color=colour, alpha=0.55, linewidth=1.2)
        axes.plot(place, point[key], ".", color=colour, alpha=0.55, markersize=4)


def columns(curve: Sequence[Point], key: str) -> tuple[list[float], list[float]]:
    return [max(point["kl"], 0.0) for point in curve], [point[key] for point in curve]


def mean_of(points: Sequence[Point]) -> Point:
    return {key: statistics.mean(point[key] for point in points) for key in points[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/chain"))
    parser.add_argument("--picture", type=Path, help="where to draw (OUT/chain.png)")
    parser.add_argument("overrides", nargs="*", help="key=value for every recipe")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = [chain(seed, out, given.overrides) for seed in given.seeds]
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table_of_seeds(results), table(results), changes(results), sep="\n\n")
    draw(results, given.picture or out / "chain.png")


if __name__ == "__main__":
    main()
