"""The plot of one run, drawn from its metrics.jsonl."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.plots.figures import (
    BLUE,
    COLOURS,
    GREY,
    figure_of,
    finite,
    floats,
    legend_above,
    mean_and_interval,
    plot_text,
    points_with_intervals,
    running_mean,
)
from lmgym.logs.records import StepClock, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "D", "s")  # of the splits: told apart without colours too
ALWAYS_EVALUATED = ("reward", "length/mean", "truncated")  # metrics of every task; other metrics are preferred
ENDS = ("", "/low", "/high")  # of a metric's name: the keys of its mean and interval
LEAST_KL = 1e-6  # nats per token: below it a divergence is rounding


def training_plot(metrics_path: Path, out: Path, metric: str | None = None) -> Path:
    """Plot reward, held-out metric and diagnostics over the steps. Returns `out` (a PNG).

    Upper row: the mean reward of each step (the loss, if no stage has rewards) with its running mean; and `metric` (by
    default the task's first) of every evaluation with its 95% interval, one colour for each split. A split that was
    evaluated once or twice, as before and after, is points without a line.
    Lower row, if recorded and not 0 throughout: entropy, completion length, truncated share, KL divergences, gradient
    norm (its scale is logarithmic if it spans more than a factor of 30).

    A panel shows the stages that it has data of; steps are counted through all stages. Nulls are gaps. Raises
    LmgymError if the file is missing or damaged, or has nothing to draw.

    Example: training_plot(Path("runs/a/metrics.jsonl"), Path("runs/a/training.png"))"""
    run = Records(metrics_path, metric)
    rows = [row for row in panels(run) if row]
    if not rows:
        raise LmgymError(f"{metrics_path}: there is nothing to draw yet, neither a reward, a loss nor an evaluation")
    with figure_of(out, 12, 6) as figure:
        parts = figure.subfigures(len(rows), 1, height_ratios=[5, 3][: len(rows)], squeeze=False)[:, 0]
        for row, part in zip(rows, parts, strict=True):
            legends = any(panel.legend for panel in row)
            for panel, axes in zip(row, part.subplots(1, len(row), squeeze=False)[0], strict=True):
                panel.draw(run, axes)
                axes.set_title(plot_text(panel.title), pad=22 if legends else 6)
                axes.set_ylabel(panel.unit)
                if panel.legend:
                    legend_above(axes, columns=4)
                _stages(run, axes, panel.stages, named=row is rows[0])
    return out


@dataclass(frozen=True)
class Panel:
    """One part of the plot: what it is called, the stages that it has data of, and the function that draws it."""

    title: str
    unit: str
    stages: list[int]
    draw: Callable[["Records", "Axes"], None]
    legend: bool = False


def panels(run: "Records") -> tuple[list[Panel], list[Panel]]:
    """The panels of both rows, for whatever the records have."""
    above, below = [], []
    if name := run.reward_name:
        rewards = name == "reward"
        title, unit = ("Training reward", "mean reward of the step") if rewards else ("Training loss", plot_text(name))
        above.append(Panel(title, unit, run.stages_with(name), _reward, legend=run.window > 1))
    if evaluated := [record for _, record in run.evaluations if finite(record.get(run.metric))]:
        held_out = sorted({record["stage"] for record in evaluated})
        bounded = [finite(record.get(f"{run.metric}/low")) for record in evaluated]
        title = f"Held-out {run.metric}, {mean_and_interval(bounded)}"
        above.append(Panel(title, "mean over prompts", held_out, _held_out, legend=True))
    for name, title, unit in (("entropy", "Entropy", "nats per token"), ("length/mean", "Completion length", "tokens")):
        if run.has(name):
            below.append(Panel(title, unit, run.stages_with(name), _lines([name])))
    if run.largest("truncated") > 0:
        below.append(Panel("Truncated answers", "% of the step", run.stages_with("truncated"), _truncated))
    names = [name for name in run.names("kl/") if name != "kl/coefficient" and run.largest(name) > LEAST_KL]
    if names:
        title = "KL divergence" if len(names) > 1 else f"KL from the {_other_policy(names[0])}"
        below.append(Panel(title, "nats per token", run.stages_with(*names), _lines(names), legend=len(names) > 1))
    if run.has("gradient_norm"):
        below.append(Panel("Gradient norm", "before clipping", run.stages_with("gradient_norm"), _gradient))
    return above, below


class Records:
    """The records as columns; steps are counted through all stages. Missing and null numbers are NaN."""

    def __init__(self, path: Path, metric: str | None):
        clock, records = StepClock(), list(read_records(path))
        at = [clock.position(record) for record in records]
        pairs = list(zip(at, records, strict=True))
        self.train = [(step, record) for step, record in pairs if record["kind"] == "train"]
        self.evaluations = [(step, record) for step, record in pairs if record["kind"] == "evaluation"]
        self.steps = np.array([step for step, _ in self.train], dtype=float)
        self.stages = {record["stage"]: str(record.get("stage_name", "")) for record in records}
        self.starts = {stage: clock.start(stage) for stage in self.stages}
        self.end = clock.start(max(clock.lengths) + 1) if records else 0
        # The curve of training: the reward, or the first loss if there is no reward.
        losses = [name for _, record in self.train for name in record if name.startswith("loss")]
        self.reward_name = next((name for name in ["reward", *losses] if self.has(name)), "")
        # The held-out metric: a metric with an interval, of the last stage, preferably the task's own.
        last = max((record["stage"] for _, record in self.evaluations), default=0)  # the earlier stages prepare for it
        final = [record for _, record in self.evaluations if record["stage"] == last]
        evaluated = [name for record in final for name in record if f"{name}/low" in record]
        of_task = [name for name in evaluated if name not in ALWAYS_EVALUATED]
        self.metric = metric or next(iter(of_task or evaluated), "")
        self.window = (int(np.isfinite(self.column(self.reward_name)).sum()) // 15) | 1

    def has(self, name: str) -> bool:
        return any(finite(record.get(name)) for _, record in self.train)

    def column(self, name: str) -> np.ndarray:
        return floats([record.get(name) for _, record in self.train])

    def names(self, prefix: str) -> list[str]:
        """The train metrics under this prefix, in the order of their first appearance."""
        names = dict.fromkeys(name for _, record in self.train for name in record if name.startswith(prefix))
        return [name for name in names if self.has(name)]

    def largest(self, name: str) -> float:
        """The largest absolute value of a train metric; 0 without one."""
        return float(np.nanmax(np.abs(self.column(name)))) if self.has(name) else 0.0

    def stages_with(self, *names: str) -> list[int]:
        """The stages with a number of one of these train metrics."""
        return sorted({r["stage"] for _, r in self.train if any(finite(r.get(name)) for name in names)})

    def name(self, stage: int) -> str:
        return self.stages[stage] or f"stage {stage + 1}"

    def extent(self, stages: Sequence[int]) -> tuple[int, int]:
        """The steps that these stages begin and end at, one step or more."""
        later = [start for stage, start in self.starts.items() if stage > max(stages)]
        begin, end = self.starts[min(stages)], min(later, default=self.end)
        return begin, max(end, begin + 1)


def _reward(run: Records, axes: "Axes") -> None:
    values = run.column(run.reward_name)
    if run.window == 1:  # too few steps for a running mean
        axes.plot(run.steps, values, color=BLUE, linewidth=1.5, marker=_dot(values))
        return
    axes.plot(run.steps, values, color=BLUE, alpha=0.35, linewidth=0.8, label="each step")
    smooth = np.concatenate([running_mean(values[rows], run.window) for rows in _rows_by_stage(run)] or [values])
    axes.plot(run.steps, smooth, color=BLUE, linewidth=2, label=f"mean of {run.window} steps")


def _held_out(run: Records, axes: "Axes") -> None:
    splits = list(dict.fromkeys(str(record.get("split", "held out")) for _, record in run.evaluations))
    for place, split in enumerate(splits):
        chosen = [(at, r) for at, r in run.evaluations if str(r.get("split", "held out")) == split]
        steps = np.array([at for at, _ in chosen], dtype=float)
        mean, *ends = (floats([record.get(f"{run.metric}{end}") for _, record in chosen]) for end in ENDS)
        counts = {record.get("count") for _, record in chosen}
        size = f", {counts.pop()} prompts" if len(counts) == 1 and None not in counts else ""
        few = len(set(steps[np.isfinite(mean)].tolist())) < 3  # before and after: nothing is known between them
        colour, marker = COLOURS[1 + place % len(MARKERS)], MARKERS[place % len(MARKERS)]
        label = plot_text(f"{split}{size}")
        points_with_intervals(axes, steps, (mean, *ends), colour, marker, label, line=not few, aside=6.0 * (place > 0))


def _lines(names: Sequence[str]) -> Callable[[Records, "Axes"], None]:
    """Draws several train metrics, each with its name."""

    def draw(run: Records, axes: "Axes") -> None:
        for name, colour in zip(names, cycle(COLOURS[:4]), strict=False):
            _line(run, axes, run.column(name), colour, plot_text(_other_policy(name)))

    return draw


def _truncated(run: Records, axes: "Axes") -> None:
    _line(run, axes, 100 * run.column("truncated"))
    axes.set_ylim(-0.2, max(5.0, 105 * run.largest("truncated")))  # a single answer is no mountain


def _gradient(run: Records, axes: "Axes") -> None:
    values = run.column("gradient_norm")
    axes.set_yscale("log" if _spans_much(values) else "linear")
    _line(run, axes, values)


def _line(run: Records, axes: "Axes", values: np.ndarray, colour: str = BLUE, label: str = "") -> None:
    axes.plot(run.steps, values, color=colour, linewidth=1.2, marker=_dot(values), label=label)


def _other_policy(name: str) -> str:
    """What a divergence is measured from, in words: kl/old is from the policy that sampled."""
    return {"kl/old": "old policy"}.get(name, name.removeprefix("kl/"))


def _stages(run: Records, axes: "Axes", stages: Sequence[int], named: bool) -> None:
    """Limit the x axis (whole steps) to these stages, and mark where each begins, in the upper row with its name."""
    from matplotlib.ticker import MaxNLocator

    begin, end = run.extent(stages)
    width = end - begin
    axes.set_xlim(begin - 0.02 * width, end + 0.035 * width)  # room for the markers at both ends
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if named else 4, steps=[1, 2, 5, 10], integer=True))
    only = f" ({run.name(stages[0])})" if len(stages) == 1 and len(run.stages) > 1 else ""
    counted = ", counted through all stages" if named and len(run.stages) > 1 else ""
    axes.set_xlabel(plot_text(f"step{only}{counted}"))
    starts = {stage: start for stage, start in sorted(run.starts.items()) if begin <= start < end}
    for start in starts.values():
        if start > begin:
            axes.axvline(start, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    if named and len(starts) > 1:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.09 * (high - low))  # a line of text above the data
        _stage_names(run, axes, starts, width, end)


def _stage_names(run: Records, axes: "Axes", starts: dict[int, int], width: int, end: int) -> None:
    pending: list[str] = []
    for (stage, start), following in zip(starts.items(), [*list(starts.values())[1:], end], strict=True):
        pending.append(run.name(stage))
        room = (following - start) / width
        if room < 0.03 and following != end:
            continue  # too narrow for its name: the next stage shows both
        name = plot_text(" → ".join(pending))
        _stage_name(axes, start, name, before=room < 0.03, upright=room < 0.02 + 0.014 * len(name))
        pending = []


def _stage_name(axes: "Axes", start: int, name: str, before: bool, upright: bool) -> None:
    axes.annotate(
        name,
        xy=(start, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if before else 3, -2),
        textcoords="offset points",
        rotation=90 if upright else 0,
        ha="right" if before else "left",
        va="top",
        fontsize=9,
        color=GREY,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        zorder=1.5,  # below the curves
    )


def _rows_by_stage(run: Records) -> list[np.ndarray]:
    stages = np.array([record["stage"] for _, record in run.train])
    return [np.flatnonzero(stages == stage) for stage in dict.fromkeys(stages.tolist())]


def _spans_much(values: np.ndarray) -> bool:
    """True for positive numbers, the largest of which is more than 30 times the smallest."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > 30 * known.min())


def _dot(values: np.ndarray) -> str:
    """A marker for lines of one or two points."""
    return "o" if np.isfinite(values).sum() < 3 else ""
