"""How often a probe has an effect, and when that is proven."""

from dataclasses import dataclass
from typing import Literal

from lmgym.experiments.audit.court import Tries, Try
from lmgym.rewards.probing.probes import ATTACKS
from lmgym.rewards.probing.proof import direction_of, equal
from lmgym.stats.intervals import Interval, share_interval

LOST = 0.5  # of that; a right answer that loses more is not paid as a right one
ENOUGH = 9  # examples: so many that an attack that always works is a finding


@dataclass(frozen=True)
class Rates:
    """What came of a probe. Of an attack: how often it was paid more than the plain wrong answer (`changed`), and as
    much as the right one (`reached`, of those tries whose right answer is paid more than the wrong one). Of a change:
    how often it was paid less than the plain right answer, and lost more than half of what lies between.

    Example: Rates("empty", 40, changed=Interval(...), reached=None, failed=0, unjudged=0)"""

    name: str
    tried: int
    changed: Interval | None
    reached: Interval | None
    failed: int
    unjudged: int


def judged_beside(tries: Tries, beside: Literal["right", "wrong"]) -> list[tuple[Try, float, float]]:
    """The tries that were judged, with their own number and the one beside it."""
    return [
        (one, one.value, other) for one in tries
        if one.value is not None and (other := getattr(one, beside)) is not None
    ]  # fmt: skip


def told_apart(tries: Tries) -> list[tuple[Try, float, float, float]]:
    """The judged tries whose right answer earns more than the wrong one: with their number, the right and the wrong."""
    return [
        (one, one.value, one.right, one.wrong) for one in tries
        if one.value is not None and one.right is not None and one.wrong is not None
        and one.right > one.wrong and not equal(one.right, one.wrong)
    ]  # fmt: skip


def is_reached(one: tuple[Try, float, float, float]) -> bool:
    """Whether a try of `told_apart` earns as much as the right answer."""
    _, value, right, _ = one
    return value > right or equal(value, right)


def is_lost(one: tuple[Try, float, float, float]) -> bool:
    """Whether a try of `told_apart` is no longer paid as a right answer."""
    _, value, right, wrong = one
    return right - value > LOST * (right - wrong)


def rates_of(name: str, tries: Tries, gap: float) -> Rates:
    """The rates of a probe; `gap` is what lies between a right and a wrong answer."""
    attack = name in ATTACKS
    signs = [
        direction_of(value, other, gap) for _, value, other in judged_beside(tries, "wrong" if attack else "right")
    ]
    apart = [(is_reached if attack else is_lost)(one) for one in told_apart(tries)]
    return Rates(
        name, len(tries),
        share_interval([float(sign == (1 if attack else -1)) for sign in signs]) if signs else None,
        share_interval([float(hit) for hit in apart]) if apart else None,
        sum(bool(one.error) for one in tries), sum(one.value is None and not one.error for one in tries),
    )  # fmt: skip
