"""Calibration: whether a model that is sure to 80 per cent is right in 80 per cent of the cases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lmgym.core.errors import LmgymError

BINS = 10


@dataclass(frozen=True)
class Bin:
    """The decisions whose confidence lies above `low` (in the first bin: from it) and up to `high`: how many they are,
    their mean confidence, and the share of them that is right with its Wilson interval.

    Example: Bin(low=0.9, high=0.95, count=40, confidence=0.93, right=0.8, right_low=0.65, right_high=0.9)"""

    low: float
    high: float
    count: int
    confidence: float
    right: float
    right_low: float
    right_high: float


def calibration_bins(confidences: Sequence[float], right: Sequence[float], bins: int = BINS) -> list[Bin]:
    """Decisions between two possibilities, sorted into bins of equal width by their confidence, the probability of what
    was decided, which lies between 1/2 and 1. `right` is 1 for a right decision, 0 for a wrong one, 1/2 where nothing
    was decided. Bins without a decision are left out.

    Raises LmgymError for lists of different lengths, and for a confidence that is not between 1/2 and 1.

    Example:
        >>> [(one.low, one.high, one.count, one.right) for one in calibration_bins([0.95, 1.0, 0.6], [1, 0, 1], bins=5)]
        [(0.5, 0.6, 1, 1.0), (0.9, 1.0, 2, 0.5)]
    """
    if len(confidences) != len(right):
        raise LmgymError(f"there are {len(confidences)} confidences and {len(right)} decisions; each needs one")
    if wrong := [confidence for confidence in confidences if not 0.5 <= confidence <= 1]:
        raise LmgymError(f"a confidence must lie between 0.5 and 1, not {wrong[0]}; take that of what was decided")
    members: dict[int, list[int]] = {}
    for index, confidence in enumerate(confidences):
        place = math.ceil(round((confidence - 0.5) * 2 * bins, 9)) - 1  # rounded, so that 0.6 lies below 0.6 + 1e-16
        members.setdefault(max(place, 0), []).append(index)
    filled = []
    for place, indices in sorted(members.items()):
        share = math.fsum(right[index] for index in indices) / len(indices)
        edges = 0.5 + place / (2 * bins), 0.5 + (place + 1) / (2 * bins)
        mean = math.fsum(confidences[index] for index in indices) / len(indices)
        filled.append(Bin(*edges, len(indices), mean, share, *wilson_interval(share, len(indices))))
    return filled


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error, 0 to 1: the sum over bins of count / N * |right - confidence|, of a bin the share
    of right decisions and their mean confidence.

    Source: Guo et al., arXiv 1706.04599, equation 3. With few decisions it is above 0 even for a calibrated model.
    Raises LmgymError without a decision.

    Example: calibration_error([Bin(0.9, 1.0, 2, confidence=0.975, right=0.5, right_low=0.1, right_high=0.9)]) -> 0.475
    """
    total = sum(one.count for one in bins)
    if not total:
        raise LmgymError("there is no decision whose confidence could be compared")
    return math.fsum(one.count / total * abs(one.right - one.confidence) for one in bins)


def wilson_interval(share: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a share that was found in `count` independent cases, without the continuity correction.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212. Within [0, 1], and of a
    width also where the share is 0 or 1.

    Example: wilson_interval(0.5, 10) -> (0.2366, 0.7634)"""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    widened = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / widened
    half = z / widened * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
