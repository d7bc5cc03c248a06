"""One metric of several runs as a figure for a paper: a line for each setting, its name at its end, PNG or SVG."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_json
from lmgym.logs.plots.curves import Curve, mean_and_band
from lmgym.logs.plots.figures import (
    COLOURS,
    GREY,
    draw_band,
    figure_of,
    finite,
    floats,
    limit_y,
    plot_text,
    running_mean,
)
from lmgym.logs.records import METRICS, Record, read_records, rename_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

FORMATS = (".png", ".svg")
KINDS = ("train", "evaluation")
ENDS = ("low", "high")
POSITION = ("stage", "step", "count")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), "-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
"""Lines are told apart without colours too: in black and white, and by readers who do not see all colours."""
WIDTH, HEIGHT = 5.0, 3.5  # inches, without the lines' names
LEFT, BELOW, ABOVE = 0.75, 0.55, 0.35  # of the plot's edges
BESIDE, MARGIN = 6, 6  # points left and right of a name
APART = 0.062  # least distance of two names, as a share of the plot's height
NEAREST = 6  # names that an error suggests


@dataclass(frozen=True)
class Line:
    """What is drawn for a setting: steps [points], and mean, low, high [3, points] over its runs.
    Example: Line("group_size-4", np.array([0, 20]), np.zeros((3, 2)), runs=3)"""

    name: str
    steps: np.ndarray
    bounds: np.ndarray
    runs: int


def metric_plot(groups: Mapping[str, Sequence[Path]], metric: str, out: Path, smooth: int | None = None) -> Path:
    """Draw a metric of several runs over the steps of the last stage that has it. Returns `out`, a .png or an .svg.

    `groups` holds for each setting the run folders of its seeds. The line is their mean, at the steps that all of them
    have; the band is its 95% interval (Student's t; two seeds or more that differ), cut to [0, 1] if the summaries of
    the runs call an evaluated metric a share. A setting of one run has the interval over prompts, if `metric` is one of
    an evaluation. `metric` is a key of metrics.jsonl, of the train records
    if they have it, else of the evaluations; "evaluation/reward" and "train/reward" say which. Train metrics are
    smoothed by a running mean of `smooth` steps (1: not; by default a fifteenth of the longest run).

    Raises LmgymError for another kind of file, an unknown metric (with the nearest names), a run that lacks it, runs
    without a step in common, and more settings than can be told apart.

    Example: metric_plot({"grpo": [Path("runs/a/seed-0"), Path("runs/a/seed-1")]}, "reward", Path("reward.svg"))"""
    if out.suffix.lower() not in FORMATS:
        raise LmgymError(f"--out is {out}; its name must end in {' or '.join(FORMATS)}")
    if len(groups) > len(COLOURS):
        raise LmgymError(f"{len(groups)} lines cannot be told apart; name at most {len(COLOURS)} runs or settings")
    records = {folder: list(read_records(folder / METRICS)) for folders in groups.values() for folder in folders}
    kind, name = find_metric(metric, records)
    stage = max(record["stage"] for record in _having(kind, name, (one for run in records.values() for one in run)))
    curves = {folder: _curve(folder, run, kind, name, stage) for folder, run in records.items()}
    longest = max(len(steps) for (steps, _), _ in curves.values())
    window = (smooth or longest // 15) | 1 if kind == "train" else 1  # odd
    lines = []
    for group, folders in groups.items():
        own = [(steps, running_mean(values, window)) for steps, values in (curves[folder][0] for folder in folders)]
        steps, bounds = mean_and_band(own, share=kind == "evaluation" and _is_share(folders, name))
        if len(folders) == 1:
            bounds = np.stack([own[0][1], *curves[folders[0]][1]])
        if not len(steps):
            raise LmgymError(f"the runs of {group} have no step in common at which {metric} was recorded")
        lines.append(Line(group, steps, bounds, len(folders)))
    several = len({record["stage"] for run in records.values() for record in run}) > 1
    named = next(record.get("stage_name") for run in records.values() for record in run if record["stage"] == stage)
    where = f"step of stage {named or stage + 1}" if several else "step"
    _draw(lines, f"held-out {name}" if kind == "evaluation" else name, where, caption(lines, kind, window), out)
    return out


def find_metric(metric: str, records: Mapping[Path, Sequence[Record]]) -> tuple[str, str]:
    """The kind of record ("train" or "evaluation") that has a metric, and its key there. Raises LmgymError for a metric
    that no run has, with the nearest names."""
    known: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for record in (record for run in records.values() for record in run if record["kind"] in KINDS):
        numbers = {name for name, value in record.items() if finite(value)}.difference(POSITION)
        # The ends of an interval are no metrics; in training a reward may be named "low".
        ends = {f"{name}/{end}" for name in numbers for end in ENDS} if record["kind"] == "evaluation" else set[str]()
        known[record["kind"]] |= numbers - ends
    prefix, _, rest = metric.partition("/")
    if prefix in KINDS and rest in known[prefix]:
        return prefix, rest
    for kind in KINDS:
        if metric in known[kind]:
            return kind, metric
    names = sorted(known["train"] | known["evaluation"])
    near = difflib.get_close_matches(rest if prefix in KINDS else metric, names, n=NEAREST, cutoff=0.4)
    raise LmgymError(f"no run has a metric '{metric}'; the nearest names are {', '.join(near or names[:NEAREST])}")


def caption(lines: Sequence[Line], kind: str, window: int) -> str:
    """What the lines and the bands are, in a few words.

    Example:
        >>> line = Line("a", np.arange(3), np.ones((3, 3)), runs=3)
        >>> caption([line], "train", 5)
        'mean over 3 seeds, 95% interval; mean of 5 steps'
    """
    groups, singles = [line for line in lines if line.runs > 1], [line for line in lines if line.runs == 1]
    parts = list[str]()
    if groups:
        counts = sorted({line.runs for line in groups})
        parts.append(f"mean over {' or '.join(map(str, counts))} seeds{_interval(groups)}")
    if singles and kind == "evaluation":
        parts.append("of one run: " * bool(groups) + f"mean over prompts{_interval(singles)}")
    elif singles:
        parts.append("one run each" if len(singles) > 1 else "one run")
    return "; ".join(parts) + (f"; mean of {window} steps" if window > 1 else "")


def _interval(lines: Sequence[Line]) -> str:
    return ", 95% interval" if any(np.isfinite(line.bounds[1]).any() for line in lines) else ""


def _having(kind: str, name: str, records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == kind and finite(record.get(name))]


def _curve(folder: Path, run: Sequence[Record], kind: str, name: str, stage: int) -> tuple[Curve, np.ndarray]:
    """Steps and values of a run, and its own bounds [2, points], NaN where it has none. Of evaluations only those of
    the first split count: sweeps also report a final one."""
    records = [record for record in _having(kind, name, run) if record["stage"] == stage]
    if not records:
        raise LmgymError(f"{folder} has no {kind} metric '{name}' in the stage of the other runs; leave this run out")
    by_step = {record["step"]: record for record in records if record.get("split") == records[0].get("split")}
    records = [by_step[step] for step in sorted(by_step)]  # the last one of each step
    ends = [[record.get(f"{name}/{end}") if kind == "evaluation" else None for record in records] for end in ENDS]
    bounds = np.stack([floats(own) for own in ends])
    steps = np.array([record["step"] for record in records])
    return (steps, np.array([float(record[name]) for record in records])), bounds


def _is_share(folders: Sequence[Path], name: str) -> bool:
    """Whether the summaries of these runs call a metric a share: every one that has it, and one at least."""
    found = list[bool]()
    for path in (folder / "summary.json" for folder in folders):
        try:
            summary = rename_evaluations(read_json(path))
            results = [summary[moment]["results"] for moment in ("newest", "after") if moment in summary]
            found += [bool(one[name].get("share")) for one in results if name in one]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # it has not ended, or not as runs do
            continue
    return bool(found) and all(found)


def _draw(lines: Sequence[Line], label: str, where: str, words: str, out: Path) -> None:
    from matplotlib.ticker import MaxNLocator

    with figure_of(out, WIDTH, HEIGHT, arranged=False, dpi=200) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        for line, colour, dashes in zip(lines, COLOURS, DASHES, strict=False):
            mean, low, high = line.bounds
            few = len(line.steps) < 3  # nothing is known between two points
            points: dict[str, Any] = {"linestyle": "none", "marker": "o", "clip_on": False}  # the last is on the edge
            form = points if few else {"linestyle": dashes, "linewidth": 1.8}
            draw_band(axes, line.steps, low, high, colour, 0.16, joined=not few)
            axes.plot(line.steps, mean, color=colour, **form)
        # The bands of two runs, which may be ten times as wide, do not count.
        limit_y(axes, [line.bounds if line.runs != 2 else line.bounds[:1] for line in lines], 0.06)
        longest = max(name.get_window_extent().width for name in _name_lines(axes, lines)) / figure.dpi
        axes.set_ylabel(plot_text(label))
        axes.set_xlabel(plot_text(where))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
        axes.set_title(words, fontsize=8, color=GREY, pad=8)
        # The names stand beside the plot: the longest one says how wide the figure is.
        width = WIDTH + longest + (BESIDE + MARGIN) / 72
        figure.set_size_inches(width, HEIGHT)
        axes.set_position((LEFT / width, BELOW / HEIGHT, (WIDTH - LEFT) / width, (HEIGHT - BELOW - ABOVE) / HEIGHT))


def _name_lines(axes: "Axes", lines: Sequence[Line]) -> "list[Annotation]":
    """Write each line's name beside the plot, in its colour, at the height of its end. Names that would overlap are
    moved apart, and a thin line leads from the end to a name that is not beside it. Returns the names."""
    bottom, top = axes.get_ylim()
    last = max(float(line.steps[-1]) for line in lines)
    axes.set_xlim(right=last)
    ends = []
    for line in lines:
        known = np.flatnonzero(np.isfinite(line.bounds[0]))[-1]
        ends.append((float(line.steps[known]), float(line.bounds[0][known])))
    heights = [(value - bottom) / (top - bottom) for _, value in ends]
    names = []
    for line, colour, end, height in zip(lines, COLOURS, ends, spread(heights, APART), strict=False):
        name = axes.annotate(
            plot_text(line.name),
            xy=(1, height),
            xycoords="axes fraction",
            xytext=(BESIDE, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
        names.append(name)
        if end[0] < last:
            to = bottom + height * (top - bottom)
            axes.plot([end[0], last], [end[1], to], color=colour, linewidth=0.6, alpha=0.6)
    return names


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """The heights, moved as little as need be so that they lie `apart` from each other, in the same order.

    Neighbours that are too near become one block around the mean of their heights, and so do blocks.

    Example:
        >>> [round(height, 3) for height in spread([0.50, 0.52, 0.90], apart=0.1)]
        [0.46, 0.56, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    blocks: list[list[int]] = []
    for place in order:
        blocks.append([place])
        while len(blocks) > 1 and _bottom(blocks[-1], heights, apart) - _top(blocks[-2], heights, apart) < apart:
            last = blocks.pop()
            blocks[-1] += last
    moved = list(heights)
    for block in blocks:
        for number, place in enumerate(block):
            moved[place] = _bottom(block, heights, apart) + number * apart
    return moved


def _bottom(block: Sequence[int], heights: Sequence[float], apart: float) -> float:
    return sum(heights[place] for place in block) / len(block) - apart * (len(block) - 1) / 2


def _top(block: Sequence[int], heights: Sequence[float], apart: float) -> float:
    return _bottom(block, heights, apart) + apart * (len(block) - 1)
