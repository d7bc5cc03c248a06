"""The records of rollouts.jsonl, or of timings.jsonl. One pass finds where each step's lines are; a line is read when
it is looked at."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.core.files import open_regular
from lmgym.logs.records import ROLLOUTS, TIMINGS, rename_record
from lmgym.logs.timings import PARTS
from lmgym.pictures.ids import FIRST
from lmgym.viewer.tail import Tail, inside

# The keys that every record begins with (training/loop.py): read without the rest of a line, which may be long.
BEGINNING = re.compile(
    rb'\{"kind": "(train|evaluation)", "stage": (\d{1,9}), "stage_name": "(?:[^"\\]|\\.)*", "step": (\d{1,9})(?=[,}])'
)
MOST_PROBLEMS = 20  # that are kept to be shown
LARGEST = 10**9  # stage, step or index; ids are below 2^31, but for those of pictures
Span = tuple[int, int]  # begin and end of some lines, in bytes


class Moment(NamedTuple):
    """When answers were given: in a training step, or in the evaluation after so many updates of the stage.

    Example: Moment("train", stage=1, step=12)"""

    kind: str
    stage: int
    step: int

    def __str__(self) -> str:
        """As people count: "stage 2, step 13"."""
        return f"stage {self.stage + 1}, " + (
            f"step {self.step + 1}" if self.kind == "train" else f"after step {self.step}"
        )


class Rollouts:
    """Where the records of each moment are in a run's rollouts.jsonl, or in the file `name`; `update` looks at what was
    written since.

    Example: Rollouts(Path("runs/a")).records(Moment("train", 1, 12))[0]["score"] -> 1.0"""

    def __init__(self, folder: Path, name: str = ROLLOUTS) -> None:
        self.path = inside(folder, name)
        self._tail = Tail(self.path, self._clear)
        self._clear()

    def _clear(self) -> None:
        self.spans: dict[Moment, list[list[int]]] = {}
        self.problems: list[str] = []
        self._sorted: list[Moment] = []

    def update(self) -> None:
        """Look at the lines that are new. A file that cannot be read counts as empty, and `problems` says why."""
        try:
            self._look()
        except LmgymError as error:
            add_problem(self.problems, str(error))

    def _look(self) -> None:
        for begin, line in self._tail.lines():
            moment = _moment(line)
            if moment is None:
                add_problem(self.problems, no_record(self.path.name, self._tail.number))
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
        records, damaged = read_spans(self.path, spans, name.encode(errors="ignore"))
        if damaged:
            where = f"{moment.kind} records of {moment}"
            add_problem(self.problems, f"{self.path.name}: {damaged} of the {where} cannot be made sense of")
        return records


def read_spans(path: Path, spans: Sequence[Span], holding: bytes = b"") -> tuple[list[dict[str, Any]], int]:
    """The records in these parts of a rollouts.jsonl or timings.jsonl whose lines hold some bytes; a line that is no
    record of that file is left out and counted. Raises LmgymError if the file cannot be read."""
    records: list[dict[str, Any]] = []
    damaged, is_whole = 0, is_timing if path.name == TIMINGS else is_rollout
    if not spans:  # older folders lack timings.jsonl
        return records, damaged
    try:
        with open_regular(path) as file:
            for begin, end in spans:
                file.seek(begin)
                for line in file.read(end - begin).split(b"\n"):
                    if not line or holding not in line:
                        continue
                    try:
                        record = rename_record(json.loads(line), path.name)
                        whole = is_whole(record)
                    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
                        whole = False  # or it was cut off since: the run was resumed
                    records += [record] if whole else []
                    damaged += not whole
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror or error}") from error
    return records, damaged


def is_rollout(record: Mapping[str, Any]) -> bool:
    """Whether a record of rollouts.jsonl has all that a view makes sense of. Raises KeyError, TypeError or
    AttributeError for what lacks a part, or has one of another kind."""
    rewards = record.get("reward_components", {}).values()
    texts = [record.get("error", ""), *(turn.get(name, "") for turn in record["turns"] for name in ("text", "given"))]
    return (
        all(_is_index(record[name]) for name in ("index", "group"))
        and _are_numbers([record.get("score"), *rewards])
        and all(isinstance(text, str) for text in texts)
        and all(_is_turn(turn) for turn in record["turns"])
    )


def _is_turn(turn: Mapping[str, Any]) -> bool:
    ids = [*turn["prompt_ids"], *turn["action_ids"], *(turn.get("source_ids") or [])]
    numbers = [turn.get("reward"), *(turn.get("logprobs") or []), *(turn.get("token_rewards") or [])]
    parts = [(version, count) for version, count in turn.get("versions") or ()]
    return (
        all(type(id) is int and (0 <= id < 2**31 or FIRST <= id < 2 * FIRST) for id in ids)
        and _are_numbers(numbers)
        and all(_is_index(version) and _is_index(count) for version, count in parts)
        and sum(count for _, count in parts) in (0, len(turn["action_ids"]))
    )


def is_timing(record: Mapping[str, Any]) -> bool:
    """Whether a record of timings.jsonl has all that a view makes sense of; raises as `is_rollout` does."""
    columns = [*(record.get(part) for part in PARTS), *record.get("rewards", {}).values()]
    answers = [own for column in columns for own in (column if isinstance(column, list) else [column])]
    return _are_numbers([one for own in answers for one in (own if isinstance(own, list) else [own])])


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether each is a number of a sensible size, NaN, or None."""
    return all(one is None or (type(one) in (int, float) and not abs(one) > 1e300) or one != one for one in values)


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def place_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Stage and step of a record. Raises ValueError if one is no whole number from 0 to a thousand million."""
    place = (record["stage"], record["step"])
    if not all(_is_index(number) for number in place):
        raise ValueError("a stage or a step is no whole number")
    return place


def no_record(name: str, line: int) -> str:
    """A sentence on a line."""
    return f"{name} line {line} is no record with kind, stage and step"


def add_problem(problems: list[str], sentence: str) -> None:
    """Keep a sentence, unless it is known or there are many already."""
    if sentence not in problems and len(problems) < MOST_PROBLEMS:
        problems.append(sentence)


def _moment(line: bytes) -> Moment | None:
    if found := BEGINNING.match(line):
        return Moment(found[1].decode(), int(found[2]), int(found[3]))
    try:  # other order of keys, of an older version
        record = json.loads(line)
        return Moment(str(record["kind"]), *place_of(record))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
