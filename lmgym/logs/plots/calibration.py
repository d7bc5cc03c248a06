"""The picture of a reward model's calibration: how sure it was, against how often it was right."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.plots.figures import BLUE, GREY, figure_of, legend_above, points_with_intervals
from lmgym.stats.calibration import Bin, calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def calibration_plot(bins: Sequence[Bin], out: Path) -> Path:
    """Draw the bins: above, the share of right decisions over their mean confidence, with Wilson's 95% interval and the
    diagonal that a calibrated model lies on; below, how many decisions each bin has. Returns `out` (a PNG). Raises
    LmgymError without a bin.

    Example: calibration_plot(calibration_bins(confidences, right), Path("runs/rm/calibration.png"))"""
    if not bins:
        raise LmgymError(f"{out}: there is no decision of a reward model to draw")
    with figure_of(out, 5.5, 6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _reliability(above, bins)
        _counts(below, bins)
    return out


def _reliability(axes: "Axes", bins: Sequence[Bin]) -> None:
    axes.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="calibrated")
    confidence, *shares = np.array([[one.confidence, one.right, one.right_low, one.right_high] for one in bins]).T
    points_with_intervals(axes, confidence, shares, BLUE, "o", "decisions of a bin, 95% interval", line=False)
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(min(0.48, *(one.right_low - 0.02 for one in bins)), 1.02)
    axes.set_ylabel("share that is right")
    decisions = sum(one.count for one in bins)
    axes.set_title(f"Calibration error {calibration_error(bins):.3f} of {decisions:,} decisions", pad=22)
    legend_above(axes, columns=2)


def _counts(axes: "Axes", bins: Sequence[Bin]) -> None:
    widths = [one.high - one.low for one in bins]
    axes.bar([one.low for one in bins], [one.count for one in bins], width=widths, align="edge", color=BLUE, alpha=0.5)
    axes.set_ylabel("decisions")
    axes.set_xlabel("confidence: the probability of what was decided")
