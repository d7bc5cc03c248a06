"""The plot of one run, drawn from its metrics.jsonl."""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.formatting import visible
from lmgym.logs.writer import StepClock, disk_errors, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe & Ito, which is safe for colour-blind readers.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
COLOURS = (ORANGE, GREEN, PURPLE)
ALWAYS_EVALUATED = ("reward", "length/mean", "truncated")  # metrics of every task; other metrics are preferred
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def training_plot(metrics_path: Path, out: Path, metric: str | None = None) -> Path:
    """Plot reward, held-out metric and diagnostics over the steps of all stages. Returns `out` (a PNG).

    Upper row: the mean reward of each step (the loss, if no stage has rewards) with its running mean; and `metric` (by
    default the task's first) of every evaluation with its 95% interval, one colour for each split.
    Lower row, if recorded: entropy, completion length and truncated share, KL divergences, gradient norm.
    Nulls are gaps. Raises LmgymError if the file is missing or damaged, or has nothing to draw.

    Example: training_plot(Path("runs/a/metrics.jsonl"), Path("runs/a/training.png"))
    """
    from matplotlib import style  # imported here since matplotlib takes long to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    run = _Run(metrics_path, metric)
    # Draw only the panels whose metrics were recorded.
    above = [draw for draw, recorded in ((_reward, run.reward_name), (_held_out, run.held_out)) if recorded]
    below = [draw for draw, names in DIAGNOSTICS if any(run.names(name) for name in names)]
    if not above and not below:
        raise LmgymError(f"{metrics_path}: there is nothing to draw yet, neither a reward, a loss nor an evaluation")
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(12, 5), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
        FigureCanvasAgg(figure)
        rows = [row for row in (above, below) if row]
        parts = figure.subfigures(len(rows), 1, height_ratios=[5, 3][: len(rows)], squeeze=False)[:, 0]
        for row, part in zip(rows, parts, strict=True):
            for draw, axes in zip(row, part.subplots(1, len(row), squeeze=False)[0], strict=True):
                draw(run, axes)
                _stages(run, axes, named=row is above)
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, facecolor="white")
    return out


class _Run:
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
        self.held_out = any(_finite(record.get(self.metric)) for _, record in self.evaluations)

    def has(self, name: str) -> bool:
        return any(_finite(record.get(name)) for _, record in self.train)

    def column(self, name: str) -> np.ndarray:
        return _floats([record.get(name) for _, record in self.train])

    def names(self, prefix: str) -> list[str]:
        """The train metrics under this prefix, in the order of their first appearance."""
        names = dict.fromkeys(name for _, record in self.train for name in record if name.startswith(prefix))
        return [name for name in names if self.has(name)]


def _reward(run: _Run, axes: "Axes") -> None:
    values = run.column(run.reward_name)
    window = (int(np.isfinite(values).sum()) // 15) | 1
    axes.plot(run.steps, values, color=BLUE, alpha=0.35, linewidth=0.8, marker=_dot(values), label="each step")
    if window > 1:
        smooth = np.concatenate([running_mean(values[rows], window) for rows in _rows_by_stage(run)] or [values])
        axes.plot(run.steps, smooth, color=BLUE, linewidth=2, label=f"mean of {window} steps")
        axes.legend(loc="best", handlelength=1.5)
    axes.set_title("Training reward" if run.reward_name == "reward" else "Training loss")
    axes.set_ylabel("mean reward of the step" if run.reward_name == "reward" else plot_text(run.reward_name))


def _held_out(run: _Run, axes: "Axes") -> None:
    splits = list(dict.fromkeys(str(record.get("split", "held out")) for _, record in run.evaluations))
    bounded = [_finite(r.get(f"{run.metric}/low")) for _, r in run.evaluations if _finite(r.get(run.metric))]
    for split, colour in zip(splits, cycle(COLOURS), strict=False):
        chosen = [(at, record) for at, record in run.evaluations if str(record.get("split", "held out")) == split]
        steps = np.array([at for at, _ in chosen], dtype=float)
        mean, low, high = (
            _floats([record.get(f"{run.metric}{end}") for _, record in chosen]) for end in ("", "/low", "/high")
        )
        counts = {record.get("count") for _, record in chosen}
        size = f", {counts.pop()} prompts" if len(counts) == 1 and None not in counts else ""
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.errorbar(
            steps,
            mean,
            yerr=np.abs(np.stack([mean - low, high - mean])),
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1.5,
            elinewidth=1,
            capsize=2,
            label=plot_text(f"{split}{size}"),
        )
    axes.legend(loc="best", handlelength=1.5)
    axes.set_title(plot_text(f"Held-out {run.metric}, {mean_and_interval(bounded)}"))
    axes.set_ylabel("mean over prompts")


def _entropy(run: _Run, axes: "Axes") -> None:
    _lines(run, axes, ["entropy"], "Entropy", "nats per token")


def _length(run: _Run, axes: "Axes") -> None:
    if run.has("length/mean"):
        _lines(run, axes, ["length/mean"], "Completion length", "tokens")
    if not run.has("truncated"):
        return
    # Two scales: tokens on the left, per cent on the right.
    share = axes
    if run.has("length/mean"):
        share = axes.twinx()
        share.grid(False)
        share.spines["right"].set_visible(True)
    share.plot(run.steps, 100 * run.column("truncated"), color=ORANGE, linewidth=1)
    share.set_ylim(-4, 104)  # 0 % and 100 % stay visible
    share.set_ylabel("truncated, %", color=ORANGE)
    share.tick_params(axis="y", colors=ORANGE)
    axes.set_title("Length and truncated share" if share is not axes else "Truncated share")


def _kl(run: _Run, axes: "Axes") -> None:
    _lines(run, axes, run.names("kl/"), "KL divergence", "nats per token")


def _gradient(run: _Run, axes: "Axes") -> None:
    _lines(run, axes, ["gradient_norm"], "Gradient norm", "before clipping")


DIAGNOSTICS = (  # the function that draws a panel, and the prefixes of its metrics
    (_entropy, ("entropy",)),
    (_length, ("length/mean", "truncated")),
    (_kl, ("kl/",)),
    (_gradient, ("gradient_norm",)),
)


def _lines(run: _Run, axes: "Axes", names: Sequence[str], title: str, unit: str) -> None:
    for name, colour in zip(names, cycle((BLUE, *COLOURS)), strict=False):
        values = run.column(name)
        axes.plot(run.steps, values, color=colour, linewidth=1, marker=_dot(values), label=plot_text(name))
    if len(names) > 1:
        axes.legend(loc="best", handlelength=1)
    axes.set_title(title)
    axes.set_ylabel(unit)


def _stages(run: _Run, axes: "Axes", named: bool) -> None:
    """Draw the x axis (whole steps) and, for each stage, a line at its start with its name."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step, counted through all stages" if named and len(run.stages) > 1 else "step")
    end = max(1, run.end)
    axes.set_xlim(-0.015 * end, 1.015 * end)  # room for the markers at both ends
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if named else 4, steps=[1, 2, 5, 10], integer=True))
    stages = sorted(run.starts)
    pending: list[str] = []
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        start = run.starts[stage]
        if start:
            axes.axvline(start, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        pending.append(run.stages[stage] or f"stage {stage + 1}")
        if following is not None and run.starts[following] - start < 0.03 * end:
            continue  # too narrow for its name: the next stage shows both
        if named and len(stages) > 1:
            _stage_name(axes, start, plot_text(" → ".join(pending)), before=start > 0.97 * end)
        pending = []


def _stage_name(axes: "Axes", start: int, name: str, before: bool) -> None:
    axes.annotate(
        name,
        xy=(start, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if before else 3, -2),
        textcoords="offset points",
        rotation=90,
        ha="right" if before else "left",
        va="top",
        fontsize=8,
        color=GREY,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        zorder=1.5,  # below the curves
    )


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values (odd; fewer at the ends), ignoring NaN.

    Example:
        >>> running_mean(np.array([0.0, 3.0, 6.0, np.nan, np.nan]), 3).tolist()
        [1.5, 3.0, 4.5, 6.0, nan]
    """
    # Sum and count by convolution, so that NaN values count as missing.
    present = np.isfinite(values)
    kernel = np.ones(min(window, 2 * len(values) - 1))
    total = np.convolve(np.where(present, values, 0.0), kernel, "full")
    count = np.convolve(present.astype(float), kernel, "full")
    half = len(kernel) // 2
    chosen = slice(half, half + len(values))
    seen = np.round(count[chosen])
    return np.where(seen > 0, total[chosen] / np.maximum(seen, 1), np.nan)


def _rows_by_stage(run: _Run) -> list[np.ndarray]:
    stages = np.array([record["stage"] for _, record in run.train])
    return [np.flatnonzero(stages == stage) for stage in dict.fromkeys(stages.tolist())]


def _finite(value: Any) -> bool:
    """True for a number that can be drawn: neither NaN, nor infinite, nor a whole number beyond the floats."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _floats(values: Sequence[Any]) -> np.ndarray:
    return np.array([float(value) if _finite(value) else np.nan for value in values])


def _dot(values: np.ndarray) -> str:
    """A marker for lines of one or two points."""
    return "o" if np.isfinite(values).sum() < 3 else ""


def mean_and_interval(bounded: Sequence[bool]) -> str:
    """What a title says of points of which these have an interval.

    Example:
        >>> mean_and_interval([True, True]), mean_and_interval([False])
        ('mean and 95% interval', 'mean (no interval)')
    """
    if not any(bounded):
        return "mean (no interval)"
    return "mean and 95% interval" if all(bounded) else "mean and 95% interval where there is one"


def plot_text(text: str) -> str:
    """The text, escaped for matplotlib: $ begins no formula, _ hides no legend entry, control characters are shown."""
    text = visible(text).replace("$", r"\$")
    return " " + text if text.startswith("_") else text
