"""Rows that do not fit: told all at once, or left out and counted, as the task's key `unfit` says."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from lmgym.core.errors import LmgymError
from lmgym.tasks.rows import Row

FIRST = 5  # places of each kind that are told
WITHIN = re.compile(r" at column [0-9]+$| \(byte [0-9]+ of the line\)$")  # where in the row the fault is
Choice = Literal["refuse", "drop"]
Made = TypeVar("Made")


@dataclass
class Unfit:
    """The rows of a task that do not fit, by what is wrong with them.

    Example:
        >>> found = Unfit("drop")
        >>> found.add("a.jsonl:3", LmgymError("a.jsonl:3: column 'prompt' must hold a text, got 5"))
        >>> found.sentence()
        "1 row does not fit and is left out: column 'prompt' must hold a text (a.jsonl:3)"
    """

    choice: Choice = "refuse"
    first: dict[str, LmgymError] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    """Sentences about rows that were left out, of this task and of those that it is made of."""

    def add(self, where: str, error: LmgymError) -> None:
        """Note that the row at `where` does not fit. Two rows are of a kind if only their places and values differ."""
        kind = str(error).removeprefix(where).lstrip(": ").partition(", got ")[0]
        kind = kind if kind != str(error) else str(error).partition(": ")[2] or str(error)
        kind = WITHIN.sub("", kind)
        self.first.setdefault(kind, error)
        self.counts[kind] += 1
        places = self.places.setdefault(kind, [])
        if len(places) < FIRST:
            places.append(where)

    def settle(self) -> None:
        """Raise LmgymError for what was found, if rows are not to be left out; else tell of it. Then begin anew."""
        if self.counts and self.choice == "refuse":
            raise self._refusal()
        if self.counts:
            self.told.append(self.sentence())
        self.first, self.places, self.counts = {}, {}, Counter()

    def sentence(self) -> str:
        """How many rows of which kind are left out."""
        total = self.counts.total()
        does = "row does not fit and is" if total == 1 else "rows do not fit and are"
        return f"{total:,} {does} left out: {self._kinds()}"

    def _refusal(self) -> LmgymError:
        total, [first, *_] = self.counts.total(), self.first.values()
        if total == 1:
            return first
        return LmgymError(
            f"{str(first).rstrip('.')}. In all {total:,} rows do not fit (task.unfit: drop leaves them out): "
            f"{self._kinds()}"
        )

    def _kinds(self) -> str:
        return "; ".join(
            f"{f'{count:,} times ' * (count > 1)}{kind} ({_listed(self.places[kind])}{' ...' * (count > FIRST)})"
            for kind, count in self.counts.most_common()
        )


def _listed(places: list[str]) -> str:
    """Places in words: of those in one file only the first names it. Example: 'rows.jsonl:3, 7, 12'"""
    file = places[0].rpartition(":")[0]
    return ", ".join([places[0], *(one.removeprefix(f"{file}:").strip() if file else one for one in places[1:])])


_current: ContextVar[Unfit | None] = ContextVar("unfit", default=None)


@contextmanager
def telling() -> Iterator[list[str]]:
    """While tasks are loaded: the sentences about rows that were left out."""
    own = Unfit()
    token = _current.set(own)
    try:
        yield own.told
    finally:
        _current.reset(token)


@contextmanager
def collecting(choice: Choice, what: str) -> Iterator[Unfit]:
    """While a task is loaded: what `unreadable` and `fitting` note goes to the Unfit that this gives; what that has
    told of `what` is loaded, to the one around it."""
    around, own = _current.get(), Unfit(choice)
    token = _current.set(own)
    try:
        yield own
        own.settle()
    finally:
        _current.reset(token)
        if around is not None:
            around.told += [f"{what}: {sentence}" for sentence in own.told]


@contextmanager
def told_elsewhere() -> Iterator[None]:
    """For reading rows of another split: its unfit rows are reported when that split is loaded, not now."""
    token = _current.set(Unfit("drop"))
    try:
        yield
    finally:
        _current.reset(token)


def tell(sentence: str) -> None:
    """Add a sentence about rows that were left out to what is told while a task is loaded."""
    if (found := _current.get()) is not None:
        found.told.append(sentence)


def dropping() -> bool:
    """True while a task is loaded whose unfit rows are left out: then all of them must be found."""
    found = _current.get()
    return found is not None and found.choice == "drop"


def unreadable(where: str, error: LmgymError) -> None:
    """Note a row that does not fit; outside of `collecting` it is refused at once."""
    found = _current.get()
    if found is None:
        raise error
    found.add(where, error)


def fitting(rows: Iterable[Row], make: Callable[[int, Row], Made | None]) -> Iterator[Made]:
    """What `make` (row's number from 0, row) makes of rows; those that it raises LmgymError for do not fit, and those
    that it makes None of are none."""
    for number, row in enumerate(rows):
        try:
            made = make(number, row)
        except LmgymError as error:
            unreadable(row[0], error)
        else:
            if made is not None:
                yield made
