"""When numbers of a reward differ, and when an effect of a trick on them is proven."""

import math
from collections.abc import Sequence

from lmgym.rewards.check import TOLERANCE
from lmgym.stats.intervals import share_interval
from lmgym.stats.paired import tango

RATE = 0.1  # of answers; more than so many make a finding
SURE = 0.99  # confidence of the interval that proves a finding; tables show 95%
NOTABLE = 0.1  # of what lies between a right and a wrong answer; a smaller change is none


def equal(one: float | None, other: float | None) -> bool:
    """Whether two numbers of a reward are the same, up to rounding; nothing is like nothing."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def proven(hits: Sequence[bool | float]) -> bool:
    """Whether these shares are above RATE, by the lower bound of their interval."""
    return len(hits) > 3 and share_interval([float(hit) for hit in hits], SURE).low > RATE


def moved(signs: Sequence[int]) -> bool:
    """Whether more go up (1) than down (-1), by more than RATE of all."""
    up, down = signs.count(1), signs.count(-1)
    return len(signs) > 3 and tango(up, down, len(signs), SURE).low > RATE


def direction_of(one: float, other: float, gap: float) -> int:
    """1 if the first number is notably above the other, -1 if below it, else 0."""
    if equal(one, other) or abs(one - other) <= NOTABLE * gap:
        return 0
    return 1 if one > other else -1
