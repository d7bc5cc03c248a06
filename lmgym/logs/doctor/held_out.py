"""What the doctor's rules ask of a run's evaluations: how metrics of held-out examples changed, beside the reward."""

from statistics import fmean as mean
from typing import NamedTuple

from lmgym.logs.doctor.facts import bounded
from lmgym.logs.doctor.history import History, rose

GAIN = 0.1
"""Least gain in reward, as a share of the range of scores, that a held-out metric is compared with."""
ALWAYS_EVALUATED = (
    "reward",
    "length/mean",
    "truncated",
    "truncated/context",
    "environment_errors",
    "unjudged",
    "reference_nll",
)
LOWER_IS_BETTER = ("perplexity", "causal_perplexity")


class Bounds(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float


def relative_gain(history: History) -> float | None:
    """By how much of the range of scores the training reward has risen from the first evaluation to the newest; None if
    it has not, or by less than a tenth."""
    low, high = history.ranges.get("", (0.0, 0.0))
    then, now = history.then_and_now("reward")
    if not (high > low and rose(then, now)):
        return None
    gain = (mean(now) - mean(then)) / (high - low)
    return gain if gain >= GAIN else None


def goal_metric(history: History) -> str | None:
    """The first held-out metric that is no part of the reward."""
    trained = {name for name, weight in history.facts.weights.items() if weight}
    for name in history.evaluations[-1] if history.evaluations else ():
        has_interval = f"{name}/low" in history.evaluations[-1] and "/" not in name
        if has_interval and name not in (*ALWAYS_EVALUATED, *LOWER_IS_BETTER, *trained):
            return name
    return None


def held_out_values(history: History, name: str) -> dict[int, Bounds]:
    """A held-out metric by the step of its evaluation, of those that have it with an interval, which says how much of a
    change may be chance."""
    found = {}
    for record in history.evaluations:
        middle, low, high = (bounded(record.get(f"{name}{end}")) for end in ("", "/low", "/high"))
        if middle is not None and low is not None and high is not None:
            found[int(record["step"])] = Bounds(middle, low, high)
    return found


def held_out_change(history: History, name: str) -> tuple[Bounds, Bounds] | None:
    """A held-out metric in the first and in the newest evaluation; None if they are one, or if one does not have it."""
    found, ends = held_out_values(history, name), [int(record["step"]) for record in history.evaluations]
    if len(ends) < 2 or ends[0] not in found or ends[-1] not in found:
        return None
    return found[ends[0]], found[ends[-1]]
