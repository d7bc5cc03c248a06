"""What the doctor's rules ask of a run's evaluations: how metrics of held-out examples changed, beside the reward."""

from statistics import fmean as mean

from lmgym.logs.doctor.facts import Bounds, bounds_of
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


def held_out_change(history: History, name: str) -> tuple[Bounds, Bounds] | None:
    """A held-out metric in the first and in the newest evaluation. None with fewer than two evaluations, or without
    intervals, which say how much of a change may be chance."""
    if len(history.evaluations) < 2:
        return None
    before, after = (bounds_of(history.evaluations[end], name) for end in (0, -1))
    return None if before is None or after is None else (before, after)
