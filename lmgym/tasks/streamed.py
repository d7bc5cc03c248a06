"""Examples that stay in their file: of a file's lines only the places are in memory."""

import hashlib
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, overload

from lmgym.core.errors import LmgymError
from lmgym.core.files import lines_of, open_regular
from lmgym.types import Example

FIRST = 1000  # examples that are looked at before training begins


@dataclass(frozen=True)
class Places:
    """Where the lines of a file begin, those that are not blank and that were chosen: 16 bytes a line.
    Example: find_lines(Path("problems.jsonl")).starts[0]"""

    path: Path
    starts: "array[int]"
    numbers: "array[int]"
    size: int
    changed: int  # when the file was last changed, in nanoseconds
    inode: int  # which file it is: another one of this name may have the same size and time
    sha256: str
    """Of all bytes of the file, and of the chosen places."""


@dataclass(frozen=True)
class StreamedExamples(Sequence[Example]):
    """The examples of a file, each read when it is asked for. A slice is a list.

    Raises LmgymError, naming file and line, when a line that is asked for cannot be read as an example, and when the
    file is no longer the one whose lines were found.

    Example:
        >>> examples = load_task("jsonl", "train", path="problems.jsonl", test_path="test.jsonl", streaming=True)
        >>> len(examples), examples[2_000_000].id
    """

    places: Places
    read: Callable[[int, bytes], Example]
    """From the number of a line and its bytes to its example."""
    changes: tuple[Callable[[Example], Example], ...] = ()
    """What is then made of it, one after the other."""

    def __len__(self) -> int:
        return len(self.places.starts)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        example = self.read(self.places.numbers[index], self._line(self.places.starts[index]))
        for change in self.changes:
            example = change(example)
        return example

    def map(self, change: Callable[[Example], Example]) -> "StreamedExamples":
        """The same examples, each changed when it is read."""
        return replace(self, changes=(*self.changes, change))

    @property
    def digest(self) -> Mapping[str, Any]:
        """What a run's fingerprint says of them, in the form of `data_digest` (training/resuming/fingerprint.py)."""
        return {"examples": len(self), "sha256": self.places.sha256, "in any order": self.places.sha256}

    def _line(self, start: int) -> bytes:
        path = self.places.path
        try:
            with open_regular(path) as file:
                if _state(file) != (self.places.size, self.places.changed, self.places.inode):
                    raise LmgymError(f"{path} was changed after its lines were found; start again")
                file.seek(start)
                return next(lines_of(file, path))
        except OSError as error:
            raise LmgymError(f"cannot read {path}: {error.strerror or error}") from error


def find_lines(path: Path, choose: Callable[[int, bytes], bool] | None = None) -> Places:
    """Read a file once, from its beginning to its end: where its lines begin that are not blank, and that `choose`
    (line number, bytes) accepts; and a hash of all bytes. Raises LmgymError if the file cannot be read."""
    starts, numbers, all_bytes = array("q"), array("q"), hashlib.sha256()
    try:
        with open_regular(path) as file:
            size, changed, inode = _state(file)
            start = 0
            for number, line in enumerate(lines_of(file, path), start=1):
                all_bytes.update(line)
                if line.strip() and (choose is None or choose(number, line)):
                    starts.append(start)
                    numbers.append(number)
                start += len(line)
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror or error}") from error
    all_bytes.update(starts)
    return Places(path, starts, numbers, size, changed, inode, all_bytes.hexdigest())


def first_of(examples: Sequence[Example]) -> Sequence[Example]:
    """What a check before training looks at: all examples that are in memory, the first of those that are not."""
    return examples[:FIRST] if isinstance(examples, StreamedExamples) else examples


def _state(file: BinaryIO) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino
