"""A curve that others have published, and yours of the same configuration over it, with a verdict.

    lmgym train verl_gsm8k_ppo 'runs={seeds: [0, 1]}'        # on a GPU; each run's folder then stands below runs/
    python -m benchmarks.published verl_gsm8k_ppo RUN [RUN ...] --out runs/published

Without runs it prints the published points. What was translated, what differs, and where the numbers come from:
docs/published.md. The verdict is on the mean of the last third of the points that both have. The published run is one
seed, whose spread over seeds nobody knows; the interval holds the spread of your seeds (with one run: none) and, on
both sides, what so many questions leave open.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmgym.stats.intervals import Interval, student_t

COLOURS = ("#000000", "#0072b2")  # published; yours


@dataclass(frozen=True)
class Published:
    """A metric on held-out questions, after so many steps."""

    source: str
    metric: str  # as the recipe's run calls it
    split: str
    questions: int
    points: Mapping[int, float]


CURVES = {
    # verl counts steps from 0: its step 9 is the tenth. "Initial validation metrics" is the first point here.
    "verl_gsm8k_ppo": Published(
        source=(
            "eric-haibin-lin/verl-data, branch experiments, commit f07af32, gsm8k/"
            "Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log, of 2024-12-10: val/test_score/openai/gsm8k"
        ),
        metric="final_answer",
        split="test",
        questions=1312,  # of 1,319: its loader drops the last ones
        points={0: 0.0008, 435: 0.569}
        | dict(
            zip(
                range(10, 440, 10),
                (
                    *(0.013, 0.176, 0.458, 0.463, 0.480, 0.495, 0.496, 0.512, 0.506, 0.531, 0.523, 0.531, 0.523),
                    *(0.514, 0.522, 0.539, 0.556, 0.548, 0.552, 0.552, 0.539, 0.548, 0.544, 0.539, 0.550, 0.551),
                    *(0.543, 0.549, 0.556, 0.538, 0.557, 0.556, 0.562, 0.556, 0.579, 0.564, 0.557, 0.567, 0.555),
                    *(0.540, 0.555, 0.558, 0.543),
                ),
                strict=True,
            )
        ),
    )
}


def curve_of(run: Path, published: Published) -> dict[int, float]:
    """The run's own points: its metric on the split, by step."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise SystemExit(f"{run} holds no metrics.jsonl; name the folder of a run")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["step"]: row[published.metric] for row in rows if row.get("split") == published.split}
    if not found:
        raise SystemExit(f"{path}: no evaluation on the split {published.split!r} with {published.metric!r}")
    return found


def difference(published: Published, curves: Sequence[Mapping[int, float]]) -> tuple[list[int], Interval]:
    """Yours less the published, in the mean of the last third of the steps that all have.

    Example: difference(Published("", "", "", 100, {10: 0.5}), [{10: 0.6}])[1].mean -> 0.1 (and rounding)"""
    both = sorted(set(published.points).intersection(*curves))
    if not both:
        raise SystemExit(f"no step in common: the published points are {sorted(published.points)}")
    last = both[-max(1, len(both) // 3) :]
    theirs = statistics.mean(published.points[step] for step in last)
    yours = [statistics.mean(curve[step] for step in last) for curve in curves]
    # One set of questions throughout, so more points do not make the share of right answers of it more certain.
    asked = 1.96 * math.sqrt(2 * theirs * (1 - theirs) / published.questions)
    seeds = student_t(yours)
    spread = math.hypot(asked, (seeds.high - seeds.low) / 2) if seeds.has_bounds else asked
    mean = seeds.mean - theirs
    return last, Interval(mean, mean - spread, mean + spread, len(curves))


def verdict(published: Published, curves: Sequence[Mapping[int, float]]) -> str:
    """One sentence."""
    last, found = difference(published, curves)
    said = "no difference is seen" if found.low <= 0 <= found.high else "above" if found.mean > 0 else "below"
    return (
        f"steps {last[0]} to {last[-1]}: yours less the published {found} ({len(curves)} runs): {said}; "
        f"a difference of more than {max(abs(found.low), abs(found.high)):.3f} is ruled out at 95 %"
    )


def draw(name: str, published: Published, curves: Sequence[Mapping[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    for number, curve in enumerate(curves):
        axes.plot(*zip(*sorted(curve.items()), strict=True), color=COLOURS[1], label=None if number else "lmgym")
    steps, values = zip(*sorted(published.points.items()), strict=True)
    axes.plot(steps, values, color=COLOURS[0], marker=".", linewidth=1, label="published")
    axes.set(xlabel="step", ylabel=f"{published.metric}, {published.split} split", title=name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CURVES)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs of the recipe of this name")
    parser.add_argument("--out", type=Path, default=Path("runs/published"))
    given = parser.parse_args()
    published = CURVES[given.name]
    print(published.source)
    print(" ".join(f"{step}:{value:.3f}" for step, value in sorted(published.points.items())))
    curves = [curve_of(run, published) for run in given.runs]
    if curves:
        print(verdict(published, curves))
    given.out.mkdir(parents=True, exist_ok=True)
    draw(given.name, published, curves, given.out / f"{given.name}.png")


if __name__ == "__main__":
    main()
