"""`lmgym bisect RUN`: the step at which a metric of a run changed, and what else changed around it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.logs.doctor.examine import Finding, examine
from lmgym.logs.doctor.facts import bounded
from lmgym.logs.doctor.history import WINDOW, errors_apart
from lmgym.logs.records import METRICS, read_records
from lmgym.logs.traces.trace import read_step, shards
from lmgym.stats.change_point import LEAST, ChangePoint, change_point, outlier

CLOCKS = ("seconds", "tokens_per_second", "memory", "stage", "step")
CLEAR = 4.0  # standard errors by which another metric must have moved to be named
CHANCE = 0.05  # p of a change up to which it is one
SHOWN = 8


@dataclass(frozen=True)
class Moved:
    """A metric that changed around the step (NaN: it was not there): its means over the window before and behind its
    own `step`, and by how many standard errors they differ; of a step that stands alone, the mean around it, its own
    number, and how many standard deviations lie between. Example: Moved("entropy", 41, 2.1, 0.4, -12.0)"""

    name: str
    step: int
    before: float
    after: float
    errors: float


@dataclass(frozen=True)
class Change:
    """When a metric changed. `step` counts from 0; `alone`: that step stands out, and the curve goes on as before it.
    `point` is None for one that stands alone. `resumed`: what was changed when the run was resumed near it; `prompts`:
    how the kinds of examples differ; `strongest`: the examples with the largest advantages at that step."""

    metric: str
    stage: str
    step: int
    alone: bool
    point: ChangePoint | None
    moved: list[Moved]
    resumed: list[str]
    prompts: list[str]
    strongest: list[str]
    findings: list[Finding]


@dataclass(frozen=True)
class Stage:
    """The numbers of a stage: its steps, and a column for each metric (NaN where a step has none)."""

    index: int
    name: str
    steps: list[int]
    columns: dict[str, list[float]]
    resumed: list[tuple[int, str]]


def read_stage(folder: Path, name: str | None = None) -> Stage:
    """The last trained stage of a run, or the one of this name. Raises LmgymError if there is none."""
    records = list(read_records(folder / METRICS))
    names = {one["stage"]: str(one.get("stage_name", one["stage"])) for one in records if one["kind"] == "train"}
    if not names:
        raise LmgymError(f"{folder} has no step yet, so nothing has changed")
    index = max(names) if name is None else next((number for number, own in names.items() if own == name), None)
    if index is None:
        raise LmgymError(f"{folder} has no stage '{name}'; {suggest(str(name), names.values())}")
    own = [one for one in records if one["stage"] == index]
    trained = [one for one in own if one["kind"] == "train"]
    found = dict.fromkeys(key for one in trained for key, value in one.items() if bounded(value) is not None)
    metrics = [key for key in found if key.split("/")[0] not in CLOCKS]
    columns = {key: [_number(one.get(key)) for one in trained] for key in metrics}
    changes = [(one["step"], text) for one in own if one["kind"] == "resume" for text in _texts(one.get("changed"))]
    return Stage(index, names[index], [one["step"] for one in trained], columns, changes)


def find_change(folder: Path, metric: str = "reward", stage: str | None = None) -> Change | None:
    """The step at which a metric changed most clearly; None if it did not (p above CHANCE).

    Raises LmgymError for an unknown metric, and a stage of fewer than 10 steps.

    Example: find_change(Path("runs/a"), "entropy").step -> 41"""
    own = read_stage(folder, stage)
    if metric not in own.columns:
        raise LmgymError(
            f"--metric is '{metric}', which no step of stage '{own.name}' has; {suggest(metric, own.columns)}"
        )
    there = [place for place, value in enumerate(own.columns[metric]) if not math.isnan(value)]
    if len(there) < 2 * LEAST:
        raise LmgymError(f"stage '{own.name}' has {len(there)} steps with {metric}; a change needs {2 * LEAST} or more")
    values = [own.columns[metric][place] for place in there]
    alone = outlier(values)
    rest = [value for place, value in enumerate(values) if place != alone]
    point = change_point(rest)
    if point is not None and point.p <= CHANCE:
        place = point.place + (alone is not None and alone <= point.place)
        # A single step that begins a change is no outlier of its own.
        return _around(folder, own, metric, there[min(place, len(there) - 1)], point)
    return None if alone is None else _around(folder, own, metric, there[alone], None)


def _around(folder: Path, own: Stage, metric: str, place: int, point: ChangePoint | None) -> Change:
    """What else is different at a place of the curves."""
    step, alone = own.steps[place], point is None
    low, high = max(place - WINDOW, 0), min(place + WINDOW, len(own.steps))
    moved = [] if alone else sorted(_moved(own, place, low, high), key=lambda one: (one.step, -abs(one.errors)))
    if alone:
        moved = sorted(_standing_out(own, place, low, high), key=lambda one: -abs(one.errors))
    steps = own.steps[low], own.steps[high - 1]
    findings = [
        one for one in examine(folder, read_yaml(folder / "recipe.yaml")).findings
        if one.stage == own.index and one.step <= steps[1] and one.last_step >= steps[0]
    ]  # fmt: skip
    resumed = [text for at, text in own.resumed if steps[0] <= at <= steps[1]]
    prompts, strongest = _of_traces(folder, own, place, low, high)
    return Change(metric, own.name, step, alone, point, moved[:SHOWN], resumed, prompts, strongest, findings)


def _moved(own: Stage, place: int, low: int, high: int) -> Iterator[Moved]:
    """The metrics that changed within a window around a place: each at the step that parts its numbers best."""
    for name, column in own.columns.items():
        there = [place <= at for at in range(low, high) if not math.isnan(column[at])]
        if len(there) >= LEAST and len({*there}) == 1:  # new there, or gone
            known = mean([value for value in column[low:high] if not math.isnan(value)])
            before, after = (math.nan, known) if there[0] else (known, math.nan)
            yield Moved(name, own.steps[place], before, after, math.inf)
            continue
        best: Moved | None = None
        for at in range(max(low + 3, place - LEAST), min(high - 3, place + LEAST) + 1):
            sides = [[v for v in part if not math.isnan(v)] for part in (column[low:at], column[at:high])]
            if min(map(len, sides)) >= 3:
                errors = errors_apart(*sides)
                if abs(errors) > CLEAR and (best is None or abs(errors) > abs(best.errors)):
                    best = Moved(name, own.steps[at], mean(sides[0]), mean(sides[1]), errors)
        if best is not None:
            yield best


def _standing_out(own: Stage, place: int, low: int, high: int) -> Iterator[Moved]:
    """The metrics whose number at this place stands out from the window around it."""
    for name, column in own.columns.items():
        around = [value for at, value in enumerate(column[low:high], low) if at != place and not math.isnan(value)]
        if len(around) >= LEAST and not math.isnan(column[place]):
            middle = mean(around)
            spread = math.sqrt(mean([(value - middle) ** 2 for value in around]))
            apart = column[place] - middle
            if abs(apart) > 1e-12 * max(map(abs, around)) and (spread == 0 or abs(apart) > CLEAR * spread):
                yield Moved(name, own.steps[place], middle, column[place], apart / spread if spread else math.inf)


def _of_traces(folder: Path, own: Stage, place: int, low: int, high: int) -> tuple[list[str], list[str]]:
    """What the tables of traces/ say: kinds of examples whose share changed, and the strongest examples of the step."""
    there = {step for index, step in shards(folder) if index == own.index}
    kinds: list[Counter[str]] = [Counter(), Counter()]
    strongest: list[str] = []
    for at in range(low, high):
        if own.steps[at] not in there:
            continue
        with suppress(LmgymError, KeyError, TypeError, AttributeError, ValueError):
            table = read_step(folder, own.index, own.steps[at]).episodes
            kinds[at >= place].update(str(name).rpartition("/")[0] for name in table["example"])
            if at == place:
                strongest = _strongest(table)
    totals = [sum(part.values()) for part in kinds]
    shares = {
        kind: tuple(part[kind] / max(total, 1) for part, total in zip(kinds, totals, strict=True))
        for kind in {*kinds[0], *kinds[1]}
    }
    told = [
        f"prompts of {kind or 'one kind'}: {one:.0%} -> {other:.0%}"
        for kind, (one, other) in sorted(shares.items())
        if all(totals) and abs(one - other) > 0.2
    ]
    return told, strongest


def _strongest(table: Mapping[str, Any]) -> list[str]:
    """The three examples whose answers have the largest mean |advantage| in a step."""
    found: dict[str, list[float]] = {}
    for name, surprise in zip(table["example"], table["surprise"], strict=True):
        found.setdefault(str(name), []).append(bounded(surprise) or 0.0)
    order = sorted(found, key=lambda name: -mean(found[name]))
    return [f"{name} ({mean(found[name]):.3g})" for name in order[:3] if mean(found[name]) > 0]


def _number(value: Any) -> float:
    known = bounded(value)
    return math.nan if known is None else known


def _texts(value: Any) -> Sequence[str]:
    return [str(one) for one in value] if isinstance(value, list) else []
