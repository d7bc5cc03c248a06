"""Algorithms that learn from given answers, on the quickstart's problems: held-out accuracy over steps, three seeds.

    python -m benchmarks.given_answers --seeds 0 1 2 --out runs/given_answers

Each begins at the end of the quickstart's warm start and takes 40 steps (a reward model 200) of 32 problems that the
warm start has not seen, each once. dpo, orpo and a reward model learn from a right and a wrong answer to each, kto from
one that is marked right or wrong, a process reward model from the two steps of an answer: which sum, and what it makes.
A wrong answer has the words of a right one. Nearly half of them add where the problem takes away, or the other way
round; the others miscalculate. Five times 512 validation pairs (or answers in steps) are judged, and a policy answers
the same problems, sampled. `supervised` imitates the right answers, to show what the wrong ones add.

Prints a Markdown table, writes results.json and a picture for each page of docs/algorithms.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.algorithms import RATE, draw_curves, warm_start
from benchmarks.quickstart import RECIPE
from benchmarks.training import train
from lmgym.stats.intervals import student_t
from lmgym.tasks.base import hash_fraction, load_task
from lmgym.types import Example, LabelledStep, RatedAnswer

WARM_START = 100  # worked examples, the first problems of the same list
PROBLEMS = {"largest": 50, "explain": "sums", "held_out": "numbers"}  # the quickstart's
PROMPTS = 32  # a step


@dataclass(frozen=True)
class Entry:
    """An algorithm's data (a function of this file) and settings. Example: Entry("pairs")"""

    task: str
    steps: int = 40
    rate: float = RATE
    answers: bool = True
    """Whether its model can be sampled; a reward model cannot."""


CONTROL = "supervised"
ALGORITHMS = {
    "dpo": Entry("pairs"),
    "orpo": Entry("pairs"),
    "kto": Entry("marks"),
    CONTROL: Entry("pairs"),
    "reward_model": Entry("pairs", steps=200, rate=1e-3, answers=False),
    "process_reward_model": Entry("steps", steps=200, rate=1e-3, answers=False),
}
# What an evaluation reports, and how a panel names it.
METRICS = {
    "preference/accuracy": "held-out pairs in order",
    "step/accuracy": "held-out steps judged well",
    "step/first_wrong": "first wrong step found",
    "final_answer": "right sampled answers",
}


def problems(split: str, size: int) -> list[Example]:
    found: list[Example] = load_task("arithmetic", split, size=WARM_START + size, **PROBLEMS)
    return found[WARM_START:] if split == "train" else found


def wrong(example: Example) -> tuple[str, int, bool]:
    """A wrong answer in the words of a right one: its sum, its result, and whether the sum is the problem's.

    Example: ("32-29", 3, False) or ("32+29", 64, True) for 32+29=61"""
    whole, result = right(example)
    first, second = map(int, re.split("[+-]", whole))
    other, value = (f"{first}-{second}", first - second) if "+" in whole else (f"{first}+{second}", first + second)
    if value != result and value >= 0 and hash_fraction(f"sum {example.prompt}") < 0.5:
        return other, value, False
    near = [number for number in range(max(result - 9, 0), result + 10) if number != result]
    return whole, near[int(len(near) * hash_fraction(f"result {example.prompt}"))], True


def right(example: Example) -> tuple[str, int]:
    """Example: ("32+29", 61)"""
    whole, result = example.references[0].strip().split("=")
    return whole, int(result)


def pairs(split: str, size: int = 2000) -> list[Example]:
    """Problems with a right and a wrong answer each."""
    found = []
    for one in problems(split, size):
        whole, result, _ = wrong(one)
        found.append(replace(one, rated=(RatedAnswer(one.references[0], 1.0), RatedAnswer(f" {whole}={result}", 0.0))))
    return found


def marks(split: str, size: int = 2000) -> list[Example]:
    """Problems with one answer each, every other one wrong. Held-out problems have pairs, whose order is measured."""
    both = pairs(split, size)
    return both if split != "train" else [replace(one, rated=one.rated[n % 2 :][:1]) for n, one in enumerate(both)]


def steps(split: str, size: int = 2000) -> list[Example]:
    """Problems with an answer in two steps, its sum and its result. Every other answer is wrong: from its result on, or
    from its sum on, and then its result is wrong too."""
    found = []
    for n, one in enumerate(problems(split, size)):
        whole, result, known = wrong(one) if n % 2 else (*right(one), True)
        found.append(replace(one, steps=(LabelledStep(whole, known), LabelledStep(f"={result}", n % 2 == 0))))
    return found


def recipe_of(name: str, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's settings with an algorithm and its given answers, from a model folder."""
    recipe, entry = yaml.safe_load(RECIPE.read_text(encoding="utf-8")), ALGORITHMS[name]
    steps = given.steps or entry.steps
    del recipe["stages"], recipe["evaluation"]["final_split"]
    if not entry.answers:
        del recipe["rewards"]
    recipe |= {
        "task": {"name": f"benchmarks.given_answers:{entry.task}", "size": max(2000, steps * PROMPTS)},
        "algorithm": name,
        "optimizer": {"learning_rate": entry.rate},
        "prompts_per_step": PROMPTS,
        "steps": steps,
        "threads": 1,
    }
    recipe["policy"] |= {"model": str(start)}
    recipe["evaluation"] |= {"every": max(steps // 4, 1)}
    return recipe


def one_run(name: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train one algorithm with one seed, unless it is there: what its evaluations found."""
    run = given.out / f"{name}-{seed}"
    if not (run / "summary.json").exists():
        path = given.out / f"{name}-{seed}.yaml"
        path.write_text(yaml.safe_dump(recipe_of(name, start, given)), encoding="utf-8")
        train(path, [f"seed={seed}", f"out={run}"])
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    found = [one for one in records if one["kind"] == "evaluation"]
    curve = [{"step": one["step"], **{key: one[key] for key in METRICS if key in one}} for one in found]
    print(f"{name} seed {seed}: {curve[0]} to {curve[-1]}", flush=True)
    return {"algorithm": name, "seed": seed, "curve": curve}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: each metric before and at the end, means over seeds, and the gain of each seed's model."""
    lines = ["| algorithm | | before | at the end [95%] | each seed | gain [95%] |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one["algorithm"] for one in results):
        own = [one["curve"] for one in results if one["algorithm"] == name]
        for key in [key for key in METRICS if key in own[0][0]]:
            before, end = ([curve[place][key] for curve in own] for place in (0, -1))
            gains = [after - first for first, after in zip(before, end, strict=True)]
            first, last = (student_t(values, share=True) for values in (before, end))
            each = ", ".join(f"{value:.3f}" for value in end)
            lines.append(f"| {name} | {METRICS[key]} | {first.mean:.3f} | {last} | {each} | {student_t(gains)} |")
    return "\n".join(lines)


def draw(name: str, results: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each metric over steps; beside right sampled answers those of the control, in grey."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    own, control = ([one for one in results if one["algorithm"] == which] for which in (name, CONTROL))
    keys = [key for key in METRICS if key in own[0]["curve"][0]]
    size = (max(6, 3.8 * len(keys)), 3.2)
    figure, panels = pyplot.subplots(1, len(keys), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for key, axes in zip(keys, panels[0], strict=True):
        if key == "final_answer" and control:
            draw_curves(axes, control, key, "step", "#777777", "imitation of the right ones")
        draw_curves(axes, own, key, "step", label=name)
        axes.set(title=METRICS[key], xlabel="steps of 32 problems", ylim=(0, 1))
        if key == "final_answer" and control:
            axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run (40, of a reward model 200)")
    parser.add_argument(
        "--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME", help="these algorithms"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/given_answers"))
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    starts = {seed: warm_start(seed, given.out) for seed in given.seeds}
    results = [one_run(name, seed, starts[seed], given) for name in given.only for seed in given.seeds]
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    for name in given.only:
        if name != CONTROL:
            draw(name, results, given.out / f"{name}.png")


if __name__ == "__main__":
    main()
