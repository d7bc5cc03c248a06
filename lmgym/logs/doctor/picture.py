"""The doctor's picture: for each finding the metric that shows it, with the step marked."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmgym.logs.doctor.examine import Diagnosis, Finding
from lmgym.logs.doctor.history import History
from lmgym.logs.plots.figures import BLUE, GREY, ORANGE, figure_of, limit_y, plot_text, points_with_intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 6
"""Findings that are drawn, the worst first."""
COLUMNS, WIDTH, HEIGHT = 3, 4.0, 2.7  # inches a panel


def doctor_picture(diagnosis: Diagnosis, out: Path) -> Path:
    """Draw the worst findings of a run, each with the number that shows it, over the steps that it is the mean of
    (orange), and the limit that it has passed (dashed). Returns `out` (a PNG). Raises LmgymError if the file cannot be
    written.

    Example: doctor_picture(examine(Path("runs/a"), recipe), Path("runs/a/doctor.png"))"""
    findings = diagnosis.findings[:MOST]
    columns = min(COLUMNS, len(findings))
    rows = -(-len(findings) // columns)
    histories = {history.facts.stage: history for history in diagnosis.histories}
    with figure_of(out, WIDTH * columns, HEIGHT * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for number, (finding, axes) in enumerate(zip(findings, panels, strict=False), 1):
            _draw(finding, histories[finding.stage], axes)
            axes.set_title(plot_text(f"{number}  {finding.title}"))
            stage = f" of stage {finding.stage_name}" if len(diagnosis.histories) > 1 else ""
            axes.set_xlabel(plot_text(f"step{stage}"))
        for axes in panels[len(findings) :]:
            axes.set_visible(False)
    return out


def _draw(finding: Finding, history: History, axes: "Axes") -> None:
    """One panel: the curve, the limit, and the step."""
    from matplotlib.ticker import MaxNLocator

    sign = finding.sign
    steps, values = _curve(history, sign.metric)
    shown = [values]
    if sign.held_out:
        points, mean, low, high = _held_out(history, sign.metric)
        if sign.metric == "reward":  # beside the training reward, from which it stays behind
            axes.plot(steps, values, color=BLUE, alpha=0.4, linewidth=1, label="training")
        points_with_intervals(axes, points, (mean, low, high), BLUE, "o", "held out", line=len(points) > 2)
        shown = [values if sign.metric == "reward" else mean, low, high]
        axes.legend(loc="best", handlelength=1.5) if sign.metric == "reward" else None
    else:
        axes.plot(steps, values, color=BLUE, linewidth=1.2, marker="" if len(values) > 2 else "o")
    if sign.limit is not None:
        axes.axhline(sign.limit, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    # A number of the training is the mean of the steps up to this one; that of an evaluation is a point.
    if sign.held_out:
        end = begin = max(points[points <= finding.sign_step + 1], default=0.0)
    else:
        begin, end = max(finding.sign_step - sign.steps + 2, 1), finding.sign_step + 1
    axes.axvline(end, color=ORANGE, linewidth=1)
    axes.plot([begin, end], [sign.value] * 2, color=ORANGE, linewidth=3, marker="o" if begin == end else "", zorder=4)
    left = end > 0.55 * max(steps.max(initial=1.0), 1.0)  # the side of the line that has room
    axes.annotate(
        f"step {end:.0f}: {sign.value:.3g}",
        xy=(end, sign.value),
        xytext=(-6 if left else 6, 6),
        textcoords="offset points",
        ha="right" if left else "left",
        color=ORANGE,
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8},
        zorder=5,
    )
    # Nearly all values are shown: a single one may be 15 orders of magnitude away.
    known = np.concatenate([own[np.isfinite(own)] for own in shown])
    marked = np.array([sign.value] if sign.limit is None else [sign.value, sign.limit])
    limit_y(axes, [np.quantile(known, [0.02, 0.98]) if known.size else known, marked], 0.15)
    axes.set_ylabel(plot_text(sign.metric))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))


def _curve(history: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps, counted from 1, and the values of a train metric; NaN where a step has none."""
    steps, column = np.array(history.steps, dtype=float) + 1, np.full(len(history), np.nan)
    if metric in history.columns:
        column[: len(history.columns[metric])] = history.columns[metric]
    return steps, column


def _held_out(history: History, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The steps of the evaluations, and a metric's mean, low and high there."""
    records: list[Mapping[str, Any]] = history.evaluations
    bounds = [[record.get(f"{metric}{end}") for record in records] for end in ("", "/low", "/high")]
    mean, low, high = np.array(bounds, dtype=float)
    return np.array([record["step"] for record in records], dtype=float), mean, low, high
