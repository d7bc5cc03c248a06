"""Examples that stay in their files: each is made when it is asked for."""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, overload

from lmgym.core.errors import LmgymError
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.indexed import IndexedRows
from lmgym.types import Example

FIRST = 1000  # examples that are looked at before training begins


@dataclass(frozen=True)
class StreamedExamples(Sequence[Example]):
    """The examples of files whose rows can be read in any order, each made when it is asked for. A slice is a list.

    Raises LmgymError, naming file and row, when a row that is asked for cannot be read as an example, and when a file
    is no longer the one whose rows were found.

    Example:
        >>> examples = load_task("data", "train", path="problems.jsonl", test_path="test.jsonl", streaming=True)
        >>> len(examples), examples[2_000_000].id
    """

    files: tuple[IndexedRows, ...]
    read: Callable[[Row], Example]
    """From a row to its example."""
    chosen: "array[int] | None" = None
    """The numbers of the rows that are examples, those of all files counted on; None: all."""
    changes: tuple[Callable[[Example], Example], ...] = ()
    """What is then made of it, one after the other."""
    asked: bool = True
    """Whether the recipe has asked for it, and not the size of the files."""

    def __len__(self) -> int:
        return sum(map(len, self.files)) if self.chosen is None else len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = range(len(self))[index] if self.chosen is None else self.chosen[index]
        ends = [*accumulate(map(len, self.files))]
        file = bisect_right(ends, place)
        example = self.read(self.files[file].row(place - (ends[file - 1] if file else 0)))
        for change in self.changes:
            example = change(example)
        return example

    def map(self, change: Callable[[Example], Example]) -> "StreamedExamples":
        """The same examples, each changed when it is read."""
        return replace(self, changes=(*self.changes, change))

    @property
    def digest(self) -> Mapping[str, Any]:
        """What a run's fingerprint says of them, in the form of `data_digest` (training/resuming/fingerprint.py)."""
        whole = hashlib.sha256("\n".join(file.sha256 for file in self.files).encode())
        whole.update(self.chosen or b"")
        return {"examples": len(self), "sha256": whole.hexdigest(), "in any order": whole.hexdigest()}


def each(examples: Sequence[Example], change: Callable[[Example], Example]) -> Sequence[Example]:
    """The examples, each changed: now, or when it is read from its file."""
    return examples.map(change) if isinstance(examples, StreamedExamples) else [change(one) for one in examples]


def in_memory(examples: Sequence[Example], refusal: str) -> Sequence[Example]:
    """The examples for what needs all of them at once. Raises LmgymError with the `refusal` where the recipe asks that
    they stay in their files."""
    if isinstance(examples, StreamedExamples) and examples.asked:
        raise LmgymError(refusal)
    return list(examples) if isinstance(examples, StreamedExamples) else examples


def without(examples: Sequence[Example], indices: set[int]) -> Sequence[Example]:
    """The examples but those at these indices."""
    if not isinstance(examples, StreamedExamples):
        return [one for index, one in enumerate(examples) if index not in indices]
    places = range(len(examples)) if examples.chosen is None else examples.chosen
    return replace(examples, chosen=array("q", (place for n, place in enumerate(places) if n not in indices)))


def first_of(examples: Sequence[Example]) -> Sequence[Example]:
    """What a check before training looks at: all examples that are in memory, the first of those that are not."""
    return examples[:FIRST] if isinstance(examples, StreamedExamples) else examples
