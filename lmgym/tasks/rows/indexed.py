"""Rows that stay in their file and are read one at a time, in any order: of lines the places are in memory, of Arrow
tables nothing."""

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lmgym.core.errors import LmgymError
from lmgym.core.files import lines_of, open_regular
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.arrow import (
    BATCH,
    arrow_copy,
    arrow_table,
    batches_in_turn,
    checked,
    digest_of,
    parquet_size,
    rows_of_batches,
)
from lmgym.tasks.rows.json_text import json_object
from lmgym.tasks.rows.unfit import unreadable
from lmgym.tasks.rows.unpacked import archive_of, kind_of, readable

LARGE = 2**27  # bytes of rows from which on they stay in their files, unless the recipe says otherwise
LINES = (".jsonl", ".ndjson")


class IndexedRows(Protocol):
    """The rows of a file, or of a data set of the Hub. `rows` gives them in turn with their indices, at least with the
    columns `only`."""

    @property
    def sha256(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...

    def rows(self, only: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]: ...


@dataclass(frozen=True)
class Lines:
    """The lines of a .jsonl file that are not blank: 16 bytes each. Raises LmgymError when the file is no longer the
    one whose lines were found."""

    path: Path
    starts: "array[int]"
    numbers: "array[int]"
    size: int
    changed: int  # when the file was last changed, in nanoseconds
    inode: int  # which file it is: another one of this name may have the same size and time
    sha256: str
    absolute: Path = field(init=False, repr=False)  # user code may change the current folder

    def __post_init__(self) -> None:
        object.__setattr__(self, "absolute", self.path.absolute())

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> Row:
        with self._opened() as file:
            return self._read(file, index)

    def rows(self, only: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
        with self._opened() as file:
            for index, number in enumerate(self.numbers):
                try:
                    yield index, self._read(file, index)
                except LmgymError as error:
                    unreadable(f"{self.path}:{number}", error)

    def _opened(self) -> BinaryIO:
        with readable(self.path):
            file = open_regular(self.absolute)
        if _state(os.fstat(file.fileno())) != (self.size, self.changed, self.inode):
            file.close()
            raise LmgymError(f"{self.path} was changed after its lines were found; start again")
        return file

    def _read(self, file: BinaryIO, index: int) -> Row:
        with readable(self.path):
            file.seek(self.starts[index])
            line = next(lines_of(file, self.path))
        number = self.numbers[index]
        return f"{self.path}:{number}", json_object(line, self.path, number)


@dataclass(frozen=True)
class Table:
    """The rows of an Arrow table that is memory-mapped. Raises LmgymError when the file of the map is no longer the one
    that was hashed. Example: Table("rows.arrow", table, sha256).row(0)"""

    name: str
    table: Any
    sha256: str
    mapped: tuple[Path, tuple[int, int, int]] | None = None  # the file, as an absolute path, and its state
    copy: Path | None = None  # of a .parquet file, as .arrow

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, index: int) -> Row:
        self._check_unchanged()
        [row] = checked(self.table.slice(index, 1), self.name)
        return f"{self.name}: row {index + 1}", row

    def rows(self, only: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
        batches = self._batches() if self.copy is None else batches_in_turn(self.copy)
        return enumerate(
            rows_of_batches(batches if only is None else (one.select(self._of(only)) for one in batches), self.name)
        )

    def _batches(self) -> Iterator[Any]:
        for start in range(0, len(self), BATCH):
            self._check_unchanged()
            yield self.table.slice(start, BATCH)

    def _check_unchanged(self) -> None:
        """Behind the end of a file that became shorter there is nothing to read, and the process would be killed."""
        if self.mapped is not None:
            path, state = self.mapped
            with readable(path):
                found = _state(path.stat())
            if found != state:
                raise LmgymError(f"{self.name} was changed after its rows were found; start again")

    def _of(self, names: Sequence[str]) -> list[str]:
        return [name for name in self.table.column_names if name in names]


def can_stay(path: Path) -> bool:
    """True for a file whose rows can be read in any order."""
    return kind_of(path) == path.suffix.lower() in (*LINES, ".arrow", ".parquet") and archive_of(path) is None


def bytes_of(path: Path) -> int:
    """About how many bytes the rows of a file take."""
    with readable(path):
        return parquet_size(path) if kind_of(path) == ".parquet" else path.stat().st_size


def indexed(path: Path) -> IndexedRows:
    """The rows of a file. Raises LmgymError if it cannot be read."""
    if kind_of(path) in LINES:
        return find_lines(path)
    with readable(path):
        state = _state(path.stat())  # before it is hashed and mapped
    sha256 = digest_of(path)
    if kind_of(path) != ".parquet":
        return Table(str(path), arrow_table(path), sha256, (path.absolute(), state))
    copy = arrow_copy(path, sha256)  # never written to again: what replaces it is a file of its own
    return Table(str(path), arrow_table(copy), sha256, copy=copy)


def indexed_table(name: str, table: Any) -> Table:
    """The rows of a table that has no file of its own."""
    digest = hashlib.sha256()
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return Table(name, table, digest.hexdigest())


def find_lines(path: Path) -> Lines:
    """Read a file once, from its beginning to its end: where its lines begin that are not blank, and a hash of all
    bytes. Raises LmgymError if the file cannot be read."""
    starts, numbers, all_bytes = array("q"), array("q"), hashlib.sha256()
    with readable(path), open_regular(path) as file:
        size, changed, inode = _state(os.fstat(file.fileno()))
        start = 0
        for number, line in enumerate(lines_of(file, path), start=1):
            all_bytes.update(line)
            if line.strip():
                starts.append(start)
                numbers.append(number)
            start += len(line)
    return Lines(path, starts, numbers, size, changed, inode, all_bytes.hexdigest())


def _state(found: os.stat_result) -> tuple[int, int, int]:
    """Size, time of the last change in nanoseconds, and which file it is."""
    return found.st_size, found.st_mtime_ns, found.st_ino
