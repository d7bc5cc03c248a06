"""The records of rollouts.jsonl, or of timings.jsonl. One pass finds where each step's lines are; a line is read when
it is looked at."""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.core.files import open_regular
from lmgym.logs.records import rename_record
from lmgym.logs.writer import ROLLOUTS
from lmgym.viewer.tail import Tail, inside

# The keys that every record begins with (training/loop.py): read without the rest of a line, which may be long.
BEGINNING = re.compile(
    rb'\{"kind": "(train|evaluation)", "stage": (\d+), "stage_name": "(?:[^"\\]|\\.)*", "step": (\d+)'
)
Span = tuple[int, int]  # begin and end of some lines, in bytes


class Moment(NamedTuple):
    """When answers were given: in a training step, or in the evaluation after so many updates of the stage.

    Example: Moment("train", stage=1, step=12)
    """

    kind: str
    stage: int
    step: int


class Rollouts:
    """Where the records of each moment are in a run's rollouts.jsonl, or in the file `name`; `update` looks at what was
    written since.

    Example: Rollouts(Path("runs/a")).records(Moment("train", 1, 12))[0]["score"] -> 1.0
    """

    def __init__(self, folder: Path, name: str = ROLLOUTS) -> None:
        self.path = inside(folder, name)
        self._tail = Tail(self.path, self._clear)
        self._clear()

    def _clear(self) -> None:
        self.spans: dict[Moment, list[list[int]]] = {}
        self.problems: list[str] = []
        self._sorted: list[Moment] = []

    def update(self) -> None:
        """Look at the lines that are new."""
        for begin, line in self._tail.lines():
            moment = _moment(line)
            if moment is None:
                self.problems.append(
                    f"{self.path.name} line {self._tail.number} is no record with kind, stage and step"
                )
                continue
            spans = self.spans.setdefault(moment, [])
            if spans and spans[-1][1] == begin:
                spans[-1][1] = begin + len(line)
            else:
                spans.append([begin, begin + len(line)])

    def moments(self, kind: str) -> list[Moment]:
        """All moments of a kind that have answers, in order."""
        if len(self._sorted) != len(self.spans):
            self._sorted = sorted(self.spans)
        begin = bisect_left(self._sorted, Moment(kind, -1, -1))
        end = bisect_left(self._sorted, Moment(kind + "\0", -1, -1))
        return self._sorted[begin:end]

    def records(self, moment: Moment, example: str | None = None) -> list[dict[str, Any]]:
        """The records of a moment in order, under the names of today; empty if there are none. With an `example`, only
        lines that name it are made sense of."""
        spans = [(begin, end) for begin, end in self.spans.get(moment, [])]
        name = "" if example is None else json.dumps(example, ensure_ascii=False)
        return read_spans(self.path, spans, name.encode(errors="ignore"))


def read_spans(path: Path, spans: Sequence[Span], holding: bytes = b"") -> list[dict[str, Any]]:
    """The records in these parts of a rollouts.jsonl whose lines hold some bytes; a line that is no record is left out.
    Raises LmgymError if the file cannot be read."""
    records: list[dict[str, Any]] = []
    if not spans:  # older folders lack timings.jsonl
        return records
    try:
        with open_regular(path) as file:
            for begin, end in spans:
                file.seek(begin)
                for line in file.read(end - begin).split(b"\n"):
                    if not line or holding not in line:
                        continue
                    try:
                        records.append(rename_record(json.loads(line), path.name))
                    except (ValueError, RecursionError):  # cut off since: the run was resumed
                        continue
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror or error}") from error
    return records


def _moment(line: bytes) -> Moment | None:
    if found := BEGINNING.match(line):
        return Moment(found[1].decode(), int(found[2]), int(found[3]))
    try:  # other order of keys, of an older version
        record = json.loads(line)
        return Moment(str(record["kind"]), int(record["stage"]), int(record["step"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
