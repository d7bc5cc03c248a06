"""The numbers of metrics.jsonl as curves over all steps of a run, read once and then only what is new."""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmgym.logs.records import METRICS, StepClock, rename_record
from lmgym.viewer.rollouts import add_problem, no_record, place_of
from lmgym.viewer.tail import Tail, inside

MOST_POINTS = 500  # of a curve, as a screen can show
MOST_NAMES, MOST_TABLES, MOST_RESUMES = 1000, 50, 200
MOST_NUMBERS = 200_000  # of all curves: with many names, each has fewer points
ENDS = ("/low", "/high")  # of an evaluated metric's name: the keys of its interval


class Table:
    """Records of one kind as columns of numbers; NaN where a record lacks the number.

    Example:
        >>> table = Table()
        >>> table.add(0, 0, 0, {"reward": 0.5}); table.add(1, 0, 1, {"length/mean": 7.0})
        >>> table.column("reward").tolist()
        [0.5, nan]
    """

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []  # (position through all stages, stage, step)
        self.columns: dict[str, array[float]] = {}

    def add(self, position: int, stage: int, step: int, numbers: Mapping[str, float]) -> None:
        """Append one record."""
        for name, value in numbers.items():
            column = self.columns.setdefault(name, array("d"))
            column.extend([math.nan] * (len(self.places) - len(column)))
            column.append(value)
        self.places.append((position, stage, step))

    def column(self, name: str) -> np.ndarray:
        """The numbers of one name, float64 [records]."""
        column = self.columns[name]
        return np.array([*column, *[math.nan] * (len(self.places) - len(column))], dtype=float)


class Curves:
    """All numbers of a run's metrics.jsonl. `update` reads what was written since; lines that are no records are left
    out and named in `problems`.

    Example: Curves(Path("runs/a")).tree()["train"]["values"]["reward"] -> [0.25, 0.31, ...]"""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(inside(folder, METRICS), self._clear)
        self._clear()

    def _clear(self) -> None:
        self.clock = StepClock()
        self.tables: dict[str, Table] = {}  # "train", and "evaluation/SPLIT"
        self.stages: dict[int, str] = {}
        self.steps: dict[tuple[int, int], int] = {}  # (stage, step) of each train record: its row
        self.resumed: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.names = 0  # of numbers, in all tables

    def update(self) -> None:
        """Read the records that are new."""
        for _, line in self._tail.lines():
            try:
                record = rename_record(json.loads(line), METRICS)
                self._add(record, *place_of(record))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                add_problem(self.problems, no_record(METRICS, self._tail.number))

    def _add(self, record: Mapping[str, Any], stage: int, step: int) -> None:
        kind = record["kind"]
        position = self.clock.position(dict(record))
        self.stages.setdefault(stage, str(record.get("stage_name", stage)))
        if kind == "resume":
            changed = [str(what) for key in ("changed", "missing") for what in record.get(key, [])]
            if len(self.resumed) < MOST_RESUMES:
                self.resumed.append({"x": position, "changed": changed})
            return
        name = "train" if kind == "train" else f"evaluation/{record.get('split', '')}"
        if name not in self.tables and len(self.tables) >= MOST_TABLES:
            add_problem(self.problems, f"{METRICS} has more than {MOST_TABLES} splits; the later ones are left out")
            return
        table = self.tables.setdefault(name, Table())
        if kind == "train":
            self.steps[stage, step] = len(table.places)
        numbers = {
            key: float(value)
            for key, value in record.items()
            if type(value) in (int, float) and key not in ("stage", "step") and abs(value) < 1e300
        }
        new = [key for key in numbers if key not in table.columns]
        for key in new[max(0, MOST_NAMES - self.names) :]:  # of someone else's making; all would stop the browser
            add_problem(self.problems, f"{METRICS} has more than {MOST_NAMES:,} names; the later ones are left out")
            del numbers[key]
        self.names = min(MOST_NAMES, self.names + len(new))
        table.add(position, stage, step, numbers)

    def tree(self, most: int = MOST_POINTS) -> dict[str, Any]:
        """The curves as JSON can hold them. A table of more than `most` records becomes as many runs of neighbours,
        each the mean of its numbers, with the smallest and the largest as `low` and `high`."""
        tables = {}
        most = max(50, min(most, MOST_NUMBERS // max(1, self.names)))
        for name, table in self.tables.items():
            if not table.places:
                continue
            cuts = _cuts([stage for _, stage, _ in table.places], most)
            starts, middles = [begin for begin, _ in cuts], [table.places[(begin + end) // 2] for begin, end in cuts]
            tree: dict[str, Any] = {"x": [place[0] for place in middles], "places": [place[1:] for place in middles]}
            tree["grouped"] = len(cuts) < len(table.places)
            tree["values"], tree["low"], tree["high"] = {}, {}, {}
            for metric in table.columns:
                if metric.endswith(ENDS) and metric.rpartition("/")[0] in table.columns:
                    continue
                _add_curve(tree, table, metric, starts)
            tables[name] = tree
        stages = [
            {"stage": stage, "name": name, "start": self.clock.start(stage), "steps": self.clock.lengths.get(stage, 0)}
            for stage, name in sorted(self.stages.items())
        ]
        return {"tables": tables, "stages": stages, "resumed": self.resumed, "problems": list(self.problems)}

    def record(self, stage: int, step: int) -> dict[str, float]:
        """The numbers of one step's train record; none if there is none."""
        table = self.tables.get("train")
        if table is None or (stage, step) not in self.steps:
            return {}
        row = self.steps[stage, step]
        found = {name: column[row] for name, column in table.columns.items() if row < len(column)}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _add_curve(tree: dict[str, Any], table: Table, metric: str, starts: Sequence[int]) -> None:
    values = table.column(metric)
    tree["values"][metric] = _each(values, starts)
    if all(metric + end in table.columns for end in ENDS):  # the interval of an evaluation
        for key, end in zip(("low", "high"), ENDS, strict=True):
            tree[key][metric] = _each(table.column(metric + end), starts)
    elif tree["grouped"]:
        for key in ("low", "high"):
            tree[key][metric] = _each(values, starts, key)


def _cuts(stages: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Begin and end of `most` or fewer runs of neighbours per stage, about equally long; none is of two stages."""
    size = max(1, math.ceil(len(stages) / most))
    borders = [0, *(row for row in range(1, len(stages)) if stages[row] != stages[row - 1]), len(stages)]
    return [(begin, min(begin + size, last)) for first, last in pairwise(borders) for begin in range(first, last, size)]


def _each(values: np.ndarray, starts: Sequence[int], reduce: str = "mean") -> list[float | None]:
    """The mean, the "low" or the "high" of each run of neighbours, of the numbers that are there; None if none is."""
    if not len(values) or len(starts) == len(values):
        found = values
    elif reduce == "mean":
        known = ~np.isnan(values)
        totals = np.add.reduceat(np.where(known, values, 0.0), starts)
        counts = np.add.reduceat(known.astype(float), starts)
        found = np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
    else:
        found = (np.fmin if reduce == "low" else np.fmax).reduceat(values, starts)
    return [None if math.isnan(value) else value for value in found.tolist()]
