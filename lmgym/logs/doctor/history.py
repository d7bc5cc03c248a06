"""The numbers of a stage, step by step, and what the doctor's rules ask of them: windows of steps, what has changed.

Nothing here reads a file. Training adds each step when it is done, and `lmgym doctor` adds the records of a run folder
in their order; so both see the same."""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean as mean
from typing import Literal

from lmgym.logs.doctor.facts import Answer, Bounds, Facts, Record, bounded, bounds_of

WINDOW = 10
"""Steps in a mean. The reward of a single step is noisy; a run that is shorter is not judged."""
ERRORS = 2.0
"""Standard errors by which two windows must differ to count as different: chance alone does it in 1 of 20 cases."""
ANSWERS = 256
"""The newest tracked answers that are kept, to compare answers with each other."""
SOLVED = 0.8
"""A task counts as solved if the mean reward is at least here, where 0 is the worst answer seen and 1 the best. Its
answers may then be all alike."""

Level = Literal["severe", "moderate", "minor"]


@dataclass(frozen=True)
class Sign:
    """What a rule has seen: a sentence, what to do, and the number that shows it, a mean over the newest `steps`.
    `limit` is what the number has passed, if there is one; `held_out`: the number is of an evaluation."""

    level: Level
    what: str
    remedy: str
    metric: str
    value: float
    limit: float | None = None
    held_out: bool = False
    steps: int = WINDOW


class History:
    """The numbers of one stage so far. A column has a number for each step, NaN where a record has none; each takes 8
    bytes.

    Example:
        >>> history = History(Facts())
        >>> for step in range(30):
        ...     history.add_step({"step": step, "reward": step / 10})
        >>> mean(history.first("reward")), mean(history.recent("reward")), len(history)
        (0.45, 2.45, 30)
    """

    def __init__(self, facts: Facts):
        self.facts = facts
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.evaluations: list[Record] = []
        self.held_out: tuple[Bounds, tuple[int, Bounds], Bounds] | None = None
        """The held-out reward of the first evaluation, of the one that is best for certain (the highest `low`) with its
        step, and of the newest, of those that have an interval."""
        self.looks: dict[str, list[int]] = {}
        """By column "watch/REWARD/answers": the places of the steps in which the reward watch has tried answers."""
        self.answers: deque[Answer] = deque(maxlen=ANSWERS)
        self.ranges: dict[str, tuple[float, float]] = {}
        """Lowest and highest value of the score (""), and of each component, in any tracked answer."""
        self.best: tuple[float, list[float], int] | None = None
        """The highest mean reward of a window so far, the window's numbers and its last step."""
        self.warm = 0
        """Steps with at least half of the schedule's highest learning rate."""

    def __len__(self) -> int:
        return len(self.steps)

    def add_step(self, record: Record, answers: Sequence[Answer] = ()) -> None:
        """Take the record of the next step, and the answers to its first prompt."""
        numbers = {name: value for name, own in record.items() if (value := bounded(own)) is not None}
        numbers = {name: value for name, value in numbers.items() if name not in ("stage", "step")}
        repeated = [answer.repeated for answer in answers if not math.isnan(answer.repeated)]
        if repeated:
            numbers["repeated"] = mean(repeated)
        # A column that earlier records lack is filled up with NaN.
        for name, value in numbers.items():
            column = self.columns.setdefault(name, array("d"))
            column.extend([math.nan] * (len(self.steps) - len(column)))
            column.append(value)
            if value > 0 and name.startswith("watch/") and name.endswith("/answers"):
                self.looks.setdefault(name, []).append(len(self.steps))
        self.steps.append(record["step"])
        for answer in answers:
            self.answers.append(answer)
            score = {} if answer.score is None else {"": answer.score}
            for name, value in {**answer.components, **score}.items():
                low, high = self.ranges.get(name, (math.inf, -math.inf))
                self.ranges[name] = (min(low, value), max(high, value))
        rewards = self.recent("reward")
        if rewards and (self.best is None or mean(rewards) > self.best[0]):
            self.best = (mean(rewards), rewards, self.steps[-1])
        self.warm += 2 * numbers.get("learning_rate", 0.0) >= self.facts.learning_rate

    def add_evaluation(self, record: Record) -> None:
        """Take an evaluation's record, unless the newest one is of the same step. Only those of the first split are
        kept: a final one has other prompts."""
        known = self.evaluations
        if known and (known[0].get("split") != record.get("split") or known[-1]["step"] == record["step"]):
            return
        known.append(record)
        if new := bounds_of(record, "reward"):
            first, best, _ = self.held_out or (new, (int(record["step"]), new), new)
            self.held_out = first, (int(record["step"]), new) if new.low > best[1].low else best, new

    def first(self, name: str) -> list[float]:
        """The numbers of the first window; empty where the run is shorter, or half of the window has none."""
        return self._window(name, 0)

    def middle(self, name: str) -> list[float]:
        """The numbers of the window in the middle."""
        return self._window(name, (len(self.steps) - WINDOW) // 2)

    def recent(self, name: str) -> list[float]:
        """The numbers of the newest window."""
        return self._window(name, len(self.steps) - WINDOW)

    def then_and_now(self, name: str) -> tuple[list[float], list[float]]:
        """The numbers around the first evaluation and around the newest, half of each window before it; near an end of
        the run those of the first or the newest window. Both are empty if they have a step in common."""
        if not self.evaluations or len(self.steps) < WINDOW:
            return [], []
        places = (bisect_left(self.steps, int(self.evaluations[end]["step"])) - WINDOW // 2 for end in (0, -1))
        first, newest = (max(0, min(place, len(self.steps) - WINDOW)) for place in places)
        return (self._window(name, first), self._window(name, newest)) if newest - first >= WINDOW else ([], [])

    @property
    def two_windows(self) -> bool:
        """True if the first and the newest window have no step in common."""
        return len(self.steps) >= 2 * WINDOW

    @property
    def gained(self) -> bool:
        """True if the training reward is clearly higher than it was at first."""
        return rose(self.first("reward"), self.recent("reward"))

    @property
    def solved(self) -> bool:
        """True if the mean reward is near the best answer's."""
        standing = self.standing()
        return standing is not None and standing >= SOLVED

    def standing(self, name: str = "") -> float | None:
        """The newest reward (or the component of this `name`), scaled: 0 is the worst tracked answer, 1 the best.
        None if all of them were equal, or none is known."""
        recent = self.recent(f"reward/{name}" if name else "reward")
        low, high = self.ranges.get(name, (0.0, 0.0))
        return (mean(recent) - low) / (high - low) if recent and high > low else None

    def _window(self, name: str, begin: int) -> list[float]:
        column = self.columns.get(name)
        if column is None or len(self.steps) < WINDOW:
            return []
        found = [value for value in column[begin : begin + WINDOW] if not math.isnan(value)]
        return found if 2 * len(found) >= WINDOW else []


def errors_apart(before: Sequence[float], after: Sequence[float]) -> float:
    """How many standard errors the mean rose by (B. L. Welch, Biometrika 34 (1947), 28-35); 0 if either is empty.

    Example:
        >>> round(errors_apart([1, 2, 3], [3, 4, 5]), 3), errors_apart([1, 1], [1, 1]), errors_apart([1, 1], [2, 2])
        (2.449, 0.0, inf)
    """
    if not (before and after):
        return 0.0
    difference = mean(after) - mean(before)
    error = math.sqrt(math.fsum(_variance(values) / len(values) for values in (before, after)))
    rounding = 1e-12 * max(map(abs, chain(before, after)))
    if error <= rounding:
        return math.copysign(math.inf, difference) if abs(difference) > rounding else 0.0
    return difference / error


def rose(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the mean is clearly higher after than before."""
    return errors_apart(before, after) >= ERRORS


def fell(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the mean is clearly lower after than before."""
    return errors_apart(before, after) <= -ERRORS


def _variance(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / max(len(values) - 1, 1)
