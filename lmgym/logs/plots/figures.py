"""What all plots share: figures, colours, texts, and points with intervals."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from lmgym.core.visible import visible
from lmgym.logs.formatting import shorten
from lmgym.logs.writer import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe & Ito, which is safe for colour-blind readers.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", "#000000", GREY)  # of lines, in this order
LONGEST_TEXT = 120  # characters of a name in a picture
STYLE = Path(__file__).with_name("lmgym.mplstyle")


def points_with_intervals(
    axes: "Axes",
    steps: np.ndarray,
    values: Sequence[np.ndarray],
    colour: str,
    marker: str,
    label: str,
    line: bool,
    aside: float = 0.0,
) -> None:
    """Draw (mean, low, high) as points with bars; with `line` they are joined and have a band. `aside` moves them to
    the right by so many points (1/72 inch), so that they do not hide others of the same steps."""
    from matplotlib.transforms import offset_copy

    mean, low, high = values
    axes.update_datalim(np.column_stack([np.tile(steps, 3), np.concatenate(list(values))]))  # moved points do not count
    if line:
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.errorbar(
        steps,
        mean,
        yerr=np.abs(np.stack([mean - low, high - mean])),
        color=colour,
        marker=marker,
        markersize=4 if line else 5.5,
        linestyle="-" if line else "none",
        linewidth=1.5,
        elinewidth=1 if line else 1.8,
        capsize=0 if line else 3,
        label=label,
        transform=axes.transData
        if line
        else offset_copy(axes.transData, cast("Figure", axes.get_figure()), aside, units="points"),
    )


def draw_band(
    axes: "Axes", steps: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, alpha: float, joined: bool
) -> None:
    """Fill what lies between `low` and `high` [points]. A step has a bar instead if neither of its neighbours has an
    interval, since a band there would have no width; and every step has one unless the points are `joined`."""
    known = np.isfinite(low) & np.isfinite(high)
    beside = np.append(known[1:], False) | np.append(False, known[:-1])
    alone = known & ~beside if joined else known
    if joined:
        axes.fill_between(steps, low, high, color=colour, alpha=alpha, linewidth=0)
    axes.vlines(steps[alone], low[alone], high[alone], colors=colour, alpha=2 * alpha, linewidth=4)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values (odd; fewer at the ends), ignoring NaN.

    Example:
        >>> running_mean(np.array([0.0, 3.0, 6.0, np.nan, np.nan]), 3).tolist()
        [1.5, 3.0, 4.5, 6.0, nan]
    """
    present, half = np.isfinite(values), min(window // 2, len(values) - 1)
    total, seen = (_sums_around(one, half) for one in (np.where(present, values, 0.0), present.astype(float)))
    return np.where(seen > 0, total / np.maximum(seen, 1), np.nan)


def _sums_around(values: np.ndarray, half: int) -> np.ndarray:
    """The sum of each number [n] and of `half` numbers on either side; fewer at the ends.

    A sum goes across two blocks of its own length: the end of one and the beginning of the next. So the time does not
    grow with `half`, and nothing is subtracted: differences of one cumulative sum would be noise behind an outlier."""
    count, width = len(values), 2 * half + 1
    padded = np.zeros(-(-(count + 2 * half) // width) * width)
    padded[half : half + count] = values
    blocks = padded.reshape(-1, width)
    beginnings, ends = blocks.cumsum(1), blocks[:, ::-1].cumsum(1)[:, ::-1]
    ends[:, 0] = 0.0  # a whole block: it is its own beginning, too
    sums: np.ndarray = ends.ravel()[:count] + beginnings.ravel()[2 * half : 2 * half + count]
    return sums


def finite(value: Any) -> TypeGuard[float]:
    """True for a number that can be drawn: neither NaN, nor infinite, nor a whole number beyond the floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def floats(values: Sequence[Any]) -> np.ndarray:
    """The numbers, NaN in place of what is none."""
    return np.array([float(value) if finite(value) else np.nan for value in values])


def mean_and_interval(bounded: Sequence[bool]) -> str:
    """What a title says of points of which these have an interval.

    Example:
        >>> mean_and_interval([True, True]), mean_and_interval([False])
        ('mean and 95% interval', 'mean (no interval)')
    """
    if not any(bounded):
        return "mean (no interval)"
    return "mean and 95% interval" if all(bounded) else "mean and 95% interval where there is one"


@contextmanager
def figure_of(out: Path, width: float, height: float, arranged: bool = True, dpi: int = 100) -> Iterator["Figure"]:
    """A figure of so many inches, which is written to `out` behind the body, in the format that the name ends in; equal
    figures are equal bytes. `arranged`: matplotlib finds the places of its parts. A link of this name, as in a run of
    someone else's, is replaced and not followed. Raises LmgymError if the file cannot be written."""
    from matplotlib import style  # imported here since matplotlib takes long to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    kind = out.suffix[1:].lower()
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {}
    with style.context(["default", str(STYLE)]):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06) if arranged else None
        figure = Figure(figsize=(width, height), dpi=dpi, layout=layout)
        FigureCanvasAgg(figure)
        yield figure
        replace_file(out, lambda file: figure.savefig(file, format=kind, facecolor="white", **options), durable=False)


def legend_above(axes: "Axes", columns: int) -> None:
    """A legend above the axes, below the title: there it hides no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=1.5, borderaxespad=0.1, borderpad=0.2
    )


def limit_y(axes: "Axes", values: Sequence[np.ndarray], share: float) -> None:
    """Set the limits of y by these numbers, with a margin of this share of their range."""
    known = np.concatenate([own[np.isfinite(own)] for own in values])
    margin = share * float(np.ptp(known)) or 0.05
    axes.set_ylim(float(known.min()) - margin, float(known.max()) + margin)


def plot_text(text: str) -> str:
    """The text, escaped for matplotlib: $ begins no formula, _ hides no legend entry, control characters are shown.

    It is shortened to `LONGEST_TEXT` characters: matplotlib draws letter by letter, 15 s for a name of 50,000."""
    text = visible(shorten(text, LONGEST_TEXT)).replace("$", r"\$")
    return " " + text if text.startswith("_") else text
