"""One plot of several runs of a recipe: a thin line for each run, a bold mean with a band for each setting."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.plots.figures import (
    COLOURS,
    draw_band,
    figure_of,
    finite,
    limit_y,
    mean_and_interval,
    plot_text,
    points_with_intervals,
    running_mean,
)
from lmgym.logs.records import read_records
from lmgym.stats.intervals import student_t

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = tuple[np.ndarray, np.ndarray]  # steps, values; both [points]


def curves_plot(groups: Mapping[str, Sequence[Path]], out: Path, metric: str, share: bool = False) -> Path:
    """Plot the last stage of several runs: the train reward (or loss) and the held-out `metric` over its steps. Returns
    `out` (a PNG).

    `groups` holds for each setting (the empty name if there are no settings) the metrics.jsonl of each seed; the first
    eight settings are drawn. The bold line is the mean over the seeds, at steps that all seeds have; the band is its
    95% interval (Student's t, two seeds or more that differ), which is cut to [0, 1] if `metric` is a `share`. Fewer
    than three evaluations are points that no line joins. Raises LmgymError if there is nothing to draw.

    Example: curves_plot({"": [Path("runs/a/seed-0/metrics.jsonl")]}, Path("runs/a/plot.png"), "final_answer")"""
    drawn = dict(list(groups.items())[: len(COLOURS)])
    read = {name: [_curves(path, metric) for path in paths] for name, paths in drawn.items()}
    # A panel for the reward (without one, the first loss), and a panel for the held-out metric, if recorded.
    names = [name for runs in read.values() for run in runs for name in run]
    left = "reward" if "reward" in names else next((name for name in names if name.startswith("loss")), "")
    smoothed = any(_window(len(run[left][0])) > 1 for runs in read.values() for run in runs if left in run)
    unit = "mean of the step" + (", smoothed" if smoothed else "")
    panels = [(left, "Training " + ("reward" if left == "reward" else "loss"), unit)]
    panels.append(("held out", f"Held-out {metric}", "mean over prompts"))
    panels = [panel for panel in panels if panel[0] in names]
    if not panels:
        raise LmgymError(f"{out}: there is nothing to draw, neither a reward, a loss nor {metric}")
    several = max(len(paths) for paths in drawn.values()) > 1
    with figure_of(out, 12, 4.4) as figure:
        for (name, title, unit), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            axes.margins(x=0.03)
            for place, (group, runs) in enumerate(read.items()):
                _draw(axes, [run[name] for run in runs if name in run], place, group, share and name == "held out")
            # Without the band: with two seeds it may be ten times as wide.
            limit_y(axes, [run[name][1] for runs in read.values() for run in runs if name in run], 0.25)
            if several and name == "held out":
                held = [[run[name] for run in runs if name in run] for runs in read.values()]
                lows = np.concatenate([mean_and_band(curves)[1][1] for curves in held if curves])
                title += f", over seeds: {mean_and_interval(np.isfinite(lows).tolist())}"
            axes.set_title(plot_text(title))
            axes.set_ylabel(unit)
            axes.set_xlabel("step of the last stage")
        # Above both panels, where it hides no data; names that are in one panel only count too.
        named = {
            label: line
            for axes in reversed(figure.axes)
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside upper left", ncols=4, handlelength=1.5)
    return out


def mean_and_band(curves: Sequence[Curve], share: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all curves have, and the mean, low and high of the curves there [3, points], of a `share` within
    [0, 1].

    Example: two seeds, evaluated at 0, 20 and at 0, 20, 40
        >>> one, other = (np.array([0, 20]), np.array([0.1, 0.5])), (np.array([0, 20, 40]), np.array([0.1, 0.7, 0.9]))
        >>> mean_and_band([one, other])[1][0].tolist()
        [0.1, 0.6]
    """
    steps = sorted(set.intersection(*({int(step) for step in steps} for steps, _ in curves)))
    by_step = [dict(zip(steps_of.tolist(), values.tolist(), strict=True)) for steps_of, values in curves]
    intervals = [student_t([values[step] for values in by_step], share=share) for step in steps]
    bounds = np.array([[mean.mean, mean.low, mean.high] for mean in intervals], dtype=float).reshape(-1, 3)
    return np.array(steps, dtype=float), bounds.T


def _curves(path: Path, metric: str) -> dict[str, Curve]:
    """Curves of a run's last stage, by name; the held-out metric is called "held out". NaN and null are left out."""
    records = list(read_records(path))
    last = max((record["stage"] for record in records), default=0)
    points: dict[str, tuple[list[int], list[float]]] = {}
    # Only the split of the first evaluation: sweeps also report a final one.
    split = next((r.get("split") for r in records if r["kind"] == "evaluation" and r["stage"] == last), None)
    for record in (record for record in records if record["stage"] == last):
        train = record["kind"] == "train"
        names = [name for name in record if name == "reward" or name.startswith("loss")] if train else [metric]
        for name in names:
            value = record.get(name)
            if finite(value) and (train or record.get("split") == split):
                steps, values = points.setdefault(name if train else "held out", ([], []))
                steps.append(record["step"])
                values.append(float(value))
    curves = {name: (np.array(steps), np.array(values)) for name, (steps, values) in points.items()}
    for name in curves.keys() - {"held out"}:
        at, train = curves[name]
        curves[name] = at, running_mean(train, _window(len(train)))
    return curves


def _window(count: int) -> int:
    """Over how many of so many steps the running mean of a curve goes: a fifteenth, odd."""
    return (count // 15) | 1


def _draw(axes: "Axes", curves: Sequence[Curve], place: int, name: str, share: bool) -> None:
    if not curves:
        return
    colour = COLOURS[place]
    steps, (mean, low, high) = mean_and_band(curves, share)
    words = [name] * bool(name) + [f"{len(curves)} seeds"] * (len(curves) > 1 or not name)
    label, joined = plot_text(", ".join(words)), len(steps) > 2
    for own_steps, values in curves:
        style = {"linewidth": 0.7} if joined else {"linestyle": "none", "marker": "."}
        axes.plot(own_steps, values, color=colour, alpha=0.45, **style)
    if not joined:
        axes.margins(x=0.12)  # room for the points beside the last step
        points_with_intervals(axes, steps, (mean, low, high), colour, "o", label, line=False, aside=6.0 * (place + 1))
        return
    axes.plot(steps, mean, color=colour, linewidth=2, label=label)
    if len(curves) > 1:
        draw_band(axes, steps, low, high, colour, 0.15, joined=True)
