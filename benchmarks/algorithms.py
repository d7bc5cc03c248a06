"""Every algorithm that learns from rewards on one task, from one warm start: after equal answers, and equal seconds.

    python -m benchmarks.algorithms --seeds 0 1 2 --out runs/algorithms

The quickstart is trained up to the end of its warm start, once a seed. From there each algorithm, with its defaults but
for the learning rate, takes `--steps` steps of 256 answers (DAPO: of 256 to 1,024, since it may draw four times). Every
few steps it answers 512 validation problems, sampled; no run selects anything by them. Prints a Markdown table: the
accuracy before, after the answers that the thriftiest algorithm had in all its steps, and after the seconds of a
processor that the fastest one needed. Writes results.json and a picture for each page of docs/algorithms (curves by
seed, mean and interval).

TRPO is not among them unless it is named: a step of 256 answers takes it more than a minute.

    python -m benchmarks.algorithms --seeds 0 1 2 --only trpo --answers 32 --steps 20 --every 2 --out runs/trpo
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
from benchmarks.training import train, train_timed
from lmgym.stats.intervals import Interval, mean_interval

RATE = 3e-4  # the quickstart's; critics learn ten times as fast
GROUPS = {"group_size": 8}
SLOW = ("trpo",)
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: GROUPS for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "rloo", "raft", "replay")},
    **{
        name: GROUPS
        for name in (
            "icepop",
            "gspo_token",
            "gmpo",
            "luspo",
            "vespo",
            "ce_gppo",
            "ipo_mask",
            "clip_cov",
            "kl_cov",
            "maxrl",
            "gpg",
            "opo",
            "otb",
            "pass_at_k",
            "gigpo",
            "hgpo",
            "top_entropy",
        )
    },
    "gfpo": {"group_size": 8, "keep": 4},
    "online_dpo": GROUPS,
    # `name` is the registered one where the entry has another.
    **{preset: {"name": "online_dpo", "preset": preset, **GROUPS} for preset in ("ipo", "simpo")},
    "xpo": {"group_size": 1},
    "nash_md": {"group_size": 4, "preference": "order"},
    "reinforce": {"group_size": 1},
    "remax": {"group_size": 1},
    "reinforce_pp": {"group_size": 1},
    "reinforce_stable": {"group_size": 1},
    **{name: {} for name in ("ppo", "a2c", "nlpo", "trpo")},
}
# Names that share a page of docs/algorithms share a picture.
PAGES = {
    "importance": ("icepop",),
    "trust_regions": ("gspo_token", "gmpo", "luspo", "vespo", "ce_gppo", "ipo_mask"),
    "group_advantages": ("maxrl", "gpg", "opo", "otb", "pass_at_k", "gfpo", "gigpo", "hgpo"),
    "token_selection": ("top_entropy", "clip_cov", "kl_cov"),
}


def warm_start(seed: int, out: Path) -> Path:
    """The quickstart's model at the end of its warm start, trained unless it is there."""
    run = out / f"start-{seed}"
    if not (run / "summary.json").exists():
        train(RECIPE, [f"seed={seed}", f"out={run}", "stages.rl.steps=1", "checkpoint.keep=1000", "threads=1"])
    return end_of_warm_start(run)


def recipe_of(name: str, start: Path, steps: int, every: int, answers: int) -> dict[str, Any]:
    """The quickstart's last stage with another algorithm and so many answers a step, from a model folder."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    stage = recipe.pop("stages")[-1]
    del stage["name"]
    fields = ALGORITHMS[name]
    rates = {"learning_rate": RATE, **({"critic_learning_rate": 10 * RATE} if not fields else {})}
    recipe |= stage | {
        "algorithm": {"name": name, **fields},
        "optimizer": rates,
        "prompts_per_step": answers // fields.get("group_size", 1),
        "steps": steps,
        "threads": 1,
    }
    recipe["policy"] |= {"model": str(start)}
    recipe["evaluation"] |= {"every": every}
    return recipe


def one_run(name: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train one algorithm with one seed: its evaluations, each with the seconds of training before it. These count
    as far as the run had a processor, so that other programs do not slow an algorithm down."""
    run = given.out / f"{name}-{seed}"
    path = given.out / f"{name}-{seed}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(name, start, given.steps, given.every, given.answers)), encoding="utf-8")
    times = given.out / f"{name}-{seed}.json"
    if not times.exists():
        times.write_text(json.dumps(train_timed(path, [f"seed={seed}", f"out={run}"])), encoding="utf-8")
    wall, processor = json.loads(times.read_text(encoding="utf-8"))
    share = min(1.0, processor / wall)
    seconds, answers, curve = 0.0, 0, []
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "train":
            seconds, answers = seconds + share * record["seconds"], answers + int(record["answers"])
        elif record["split"] == "validation":
            curve.append({"answers": answers, "seconds": seconds, "accuracy": record["final_answer"]})
    first, last = curve[0]["accuracy"], curve[-1]["accuracy"]
    print(f"{name} seed {seed}: {first:.3f} to {last:.3f} in {seconds:.0f} s", flush=True)
    return {"algorithm": name, "seed": seed, "curve": curve}


def after(results: Sequence[dict[str, Any]], what: str, most: float) -> Interval:
    """The accuracy at each run's last evaluation that came within so many answers or seconds: mean and interval."""
    reached = [[point["accuracy"] for point in one["curve"] if point[what] <= most][-1] for one in results]
    return mean_interval([[accuracy] for accuracy in reached])


def mean_at_end(results: Sequence[dict[str, Any]], what: str) -> float:
    """Answers or seconds of a whole run, on average."""
    return statistics.mean(one["curve"][-1][what] for one in results)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, the best after equal answers first."""
    names = list(dict.fromkeys(one["algorithm"] for one in results))
    by_name = {name: [one for one in results if one["algorithm"] == name] for name in names}
    answers = min(mean_at_end(own, "answers") for own in by_name.values())
    seconds = min(mean_at_end(own, "seconds") for own in by_name.values())
    rows = []
    for name, own in by_name.items():
        before, alike = (after(own, "answers", most) for most in (0, answers))
        pace = mean_at_end(own, "seconds") / mean_at_end(own, "answers") * answers
        cells = (name, f"{before.mean:.3f}", alike, f"{pace:.0f}", after(own, "seconds", seconds))
        rows.append((alike.mean, "| " + " | ".join(map(str, cells)) + " |"))
    ends = (f"after {answers:,.0f} answers [95%]", "seconds for them", f"after {seconds:.0f} s [95%]")
    head = f"| algorithm | before | {' | '.join(ends)} |"
    return "\n".join([head, "|---|---|---|---|---|", *(row for _, row in sorted(rows, reverse=True))])


def draw(names: Sequence[str], results: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation accuracy over answers, a panel for each algorithm."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    across = min(len(names), 3)
    down = -(-len(names) // across)
    size = (6, 3.2) if len(names) == 1 else (3.2 * across, 2.4 * down)
    figure, panels = pyplot.subplots(
        down, across, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for name, axes in zip(names, panels.flat, strict=False):
        draw_curves(axes, [one for one in results if one["algorithm"] == name])
        axes.set(title=name, ylim=(0, 1))
    for axes in panels.flat[len(names) :]:
        axes.remove()
    what = "accuracy, unseen numbers"
    if len(names) == 1:
        panels[0, 0].set(xlabel="sampled answers", ylabel=what)
    else:
        figure.supxlabel("sampled answers", fontsize="medium")
        figure.supylabel(what, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_curves(
    axes: Any,
    results: Sequence[dict[str, Any]],
    key: str = "accuracy",
    over: str = "answers",
    colour: str = "#0072b2",
    label: str | None = None,
) -> None:
    """The curve of each seed, and their mean with its interval."""
    curves = [[point[key] for point in one["curve"]] for one in results]
    places = [[point[over] for point in one["curve"]] for one in results]
    middle = [statistics.mean(place) for place in zip(*places, strict=True)]  # DAPO's answers differ by seed
    for place, curve in zip(places, curves, strict=True):
        axes.plot(place, curve, color=colour, alpha=0.3, linewidth=1)
    bands = [mean_interval([[value] for value in values]) for values in zip(*curves, strict=True)]
    axes.plot(middle, [band.mean for band in bands], color=colour, linewidth=2.5, label=label)
    lows = [max(band.low, 0.0) if band.low is not None else band.mean for band in bands]
    highs = [min(band.high, 1.0) if band.high is not None else band.mean for band in bands]
    axes.fill_between(middle, lows, highs, color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, metavar="NAME", help="these algorithms")
    parser.add_argument("--answers", type=int, default=256, help="answers of a step (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    given = parser.parse_args()
    given.out, given.only = given.out.absolute(), given.only or [name for name in ALGORITHMS if name not in SLOW]
    given.out.mkdir(parents=True, exist_ok=True)
    starts = {seed: warm_start(seed, given.out) for seed in given.seeds}
    with ThreadPoolExecutor(given.workers) as pool:
        pending = [pool.submit(one_run, name, seed, starts[seed], given) for name in given.only for seed in given.seeds]
        results = [future.result() for future in pending]
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    paged = {name for names in PAGES.values() for name in names}
    pictures = PAGES | {name: (name,) for name in given.only if name not in paged}
    for page, names in pictures.items():
        if shown := [name for name in names if name in given.only]:
            draw(shown, results, given.out / f"{page}.png")


if __name__ == "__main__":
    main()
