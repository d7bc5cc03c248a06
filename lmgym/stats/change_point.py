"""Where a curve changes: the place at which two lines fit it better than one. Numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmgym.core import seeds

LEAST = 5  # numbers on either side of a change
CELLS = 2**20  # numbers of curves that are fitted at once
FEWEST = 64  # curves that are drawn at once, also long ones: the loop over their numbers is Python's
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChangePoint:
    """A curve changes at `place`: the first number of its second part. `jump` is how far the second line begins above
    where the first one ends, `slopes` are those of both (per number). `f` is the largest F statistic of any place, `p`
    the share of curves without a change that reach it.

    Example: change_point([0, 1, 0, 1, 0, 1, 5, 6, 5, 6, 5, 6]).place -> 6"""

    place: int
    f: float
    p: float
    jump: float
    slopes: tuple[float, float]


def change_point(values: Sequence[float], draws: int = 999, seed: int = 0) -> ChangePoint | None:
    """The place where a straight line breaks, if it does anywhere; None for fewer than 10 numbers, or equal ones.

    The statistic is the largest F over all places of "two lines" against "one line" (Quandt 1960; Andrews 1993, "sup
    F"). Its p-value is the share of curves of Gaussian noise that reach it: noise in which neighbours resemble each
    other as much as those of the curve's residuals do (AR(1))."""
    curve = np.asarray(values, dtype=np.float64)
    count = len(curve)
    if count < 2 * LEAST or not np.isfinite(curve).all() or np.ptp(curve) <= 1e-12 * np.abs(curve).max():
        return None
    curve = (curve - curve.mean()) / curve.std()
    statistics = _f_statistics(curve[None])[0]
    place = int(np.argmax(statistics)) + LEAST
    x = np.arange(count)
    parts = (slice(None, place), slice(place, None))
    residuals = np.concatenate([curve[one] - np.polyval(np.polyfit(x[one], curve[one], 1), x[one]) for one in parts])
    largest, above = float(statistics.max()), 0
    memory = _memory(residuals)
    generator, rows = seeds.generator(seed, "change point"), max(CELLS // count, FEWEST)
    for begin in range(0, draws, rows):
        noise = generator.normal(size=(min(rows, draws - begin), count))
        for at in range(1, count):
            noise[:, at] = memory * noise[:, at - 1] + math.sqrt(1 - memory**2) * noise[:, at]
        for part in np.array_split(noise, -(-noise.size // CELLS)):
            above += int((_f_statistics(part).max(1) >= largest).sum())
    own = np.asarray(values, dtype=np.float64)
    lines = [np.polyfit(x[part], own[part], 1) for part in parts]
    ends = [float(np.polyval(line, place - 0.5)) for line in lines]
    return ChangePoint(
        place, largest, (1 + above) / (draws + 1), ends[1] - ends[0], (float(lines[0][0]), float(lines[1][0]))
    )


def _memory(residuals: Numbers) -> float:
    """The correlation of neighbours among residuals of two lines, from 0 to 0.95. Fitting makes it look smaller by some
    4 / n, which is added (Kendall 1954)."""
    found = float(residuals[1:] @ residuals[:-1]) / max(float(residuals @ residuals), 1e-300)
    return min(max(found + 4 / len(residuals), 0.0), 0.95)


def outlier(values: Sequence[float], limit: float = 10.0) -> int | None:
    """The place of the number that stands alone: farthest from the median of the five around it, by more than `limit`
    robust standard deviations (1.4826 times the median absolute deviation) of all such distances; or None.

    Example: outlier([1.0, 1.1, 0.9, 1.0, 1.1, 9.0, 1.0, 0.9, 1.1, 1.0, 0.9]) -> 5"""
    curve = np.asarray(values, dtype=np.float64)
    if len(curve) < 2 * LEAST or not np.isfinite(curve).all():
        return None
    padded = np.pad(curve, 2, mode="reflect")
    apart = np.abs(curve - np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1))
    deviation = 1.4826 * float(np.median(apart))
    place = int(np.argmax(apart))
    return place if deviation > 0 and apart[place] > limit * deviation else None


def _f_statistics(curves: Numbers) -> Numbers:
    """F of two lines against one for each curve [C, n] and each place with LEAST numbers on either side [C, places]."""
    count = curves.shape[1]
    one = _squares(curves)[:, -1:]
    places = np.arange(LEAST, count - LEAST + 1)
    two = _squares(curves)[:, places - 1] + _squares(curves[:, ::-1])[:, count - places - 1]
    two = np.maximum(two, 1e-12 * np.maximum(one, 1e-300))
    found: Numbers = np.maximum(one - two, 0.0) / 2 / (two / max(count - 4, 1))
    return found


def _squares(curves: Numbers) -> Numbers:
    """The squared residuals of the best line through the first 1, 2, ... n numbers of each curve [C, n]."""
    n = np.arange(1, curves.shape[1] + 1, dtype=np.float64)
    x = n / len(n) - 0.5
    x_sum, xx_sum = np.cumsum(x), np.cumsum(x * x)
    y_sum, yy_sum, xy_sum = (np.cumsum(one, axis=1) for one in (curves, curves * curves, curves * x))
    xx, xy = xx_sum - x_sum**2 / n, xy_sum - x_sum * y_sum / n
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = np.where(xx > 1e-15, xy**2 / xx, 0.0)
    rest: Numbers = np.maximum(yy_sum - y_sum**2 / n - explained, 0.0)
    return rest
