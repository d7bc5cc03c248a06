"""Rows of .parquet and .arrow files. Those of .arrow are memory-mapped: a row is made of them when it is asked for."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, reason
from lmgym.core.files import open_regular, replacing
from lmgym.tasks.rows.unpacked import MOST_UNPACKED, RATIO, archive_of, opened, readable

BATCH = 1024  # rows
MAGIC = b"ARROW1"  # how an .arrow file begins that holds no stream
CACHE = "lmgym/rows"  # below $XDG_CACHE_HOME: rows of large .parquet files as .arrow, by the SHA-256 of the file


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .parquet file, a few at a time."""
    number = 0
    try:
        for number, row in enumerate(rows_of_batches(_batches(path, BATCH), path), start=1):  # noqa: B007
            yield row
    except LmgymError as error:
        raise LmgymError(f"{error} (after row {number})") from error


def table_rows(table: Any, path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table, made a few at a time."""
    return rows_of_batches((table.slice(start, BATCH) for start in range(0, table.num_rows, BATCH)), path)


def rows_of_batches(batches: Iterable[Any], path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of tables or batches, one after the other."""
    rows = (row for batch in batches for row in checked(batch, path))
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def checked(rows: Any, path: Path | str) -> list[dict[str, Any]]:
    """A few rows of a table, whose buffers are looked at first: those of a damaged file may lead anywhere."""
    with _damaged(path):
        rows.validate(full=True)
        return rows.to_pylist()  # type: ignore[no-any-return]


def arrow_table(path: Path) -> Any:
    """An .arrow file's table, memory-mapped. Raises LmgymError if its parts are not as it says."""
    pyarrow = _library(path)
    with _damaged(path):
        if archive_of(path) is None:
            with readable(path):
                open_regular(path).close()  # opening a pipe would block
            source = pyarrow.memory_map(str(path))
        else:
            with opened(path) as file:
                source = pyarrow.BufferReader(file.read())
        begin = source.read(len(MAGIC))
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if begin == MAGIC else pyarrow.ipc.open_stream(source)
        return reader.read_all()


def batches_in_turn(path: Path) -> Iterator[Any]:
    """The batches of an .arrow stream one after the other, of which none stays in memory as a map's pages would."""
    pyarrow = _library(path)
    with _damaged(path), pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        yield from reader


def arrow_copy(path: Path, sha256: str) -> Path:
    """A copy of a .parquet file as .arrow, in batches of a few megabytes; it is made if there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / CACHE
    copy = folder / f"{sha256}.arrow"
    if copy.is_file():
        return copy
    with _opened_parquet(path) as parquet:
        schema = parquet.schema_arrow
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(copy, durable=False) as file, _library(path).ipc.new_stream(file, schema) as writer:
            for batch in _batches(path, 8 * BATCH):
                writer.write_batch(batch)
    except OSError as error:
        raise LmgymError(
            f"cannot write {copy}, a copy of {path}: {error.strerror or error}; set XDG_CACHE_HOME to a folder with "
            "room, or task.streaming: false"
        ) from error
    return copy


def parquet_size(path: Path) -> int:
    """The bytes of a .parquet file's rows, unpacked, as it says."""
    with _opened_parquet(path) as parquet:
        return _size(parquet)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes. Raises LmgymError if it cannot be read."""
    digest = hashlib.sha256()
    with readable(path), open_regular(path) as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _batches(path: Path, rows: int) -> Iterator[Any]:
    with _opened_parquet(path) as parquet:
        yield from parquet.iter_batches(batch_size=rows)


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    """A .parquet file. Raises LmgymError if it is damaged, and if it unpacks to far more than data does."""
    pyarrow = _library(path)
    with _damaged(path), opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as parquet:
            if _size(parquet) > max(MOST_UNPACKED, RATIO * size):
                raise LmgymError(f"{path} unpacks to more than {MOST_UNPACKED:,} bytes and {RATIO} times its size")
            yield parquet


def _size(parquet: Any) -> int:
    return sum(parquet.metadata.row_group(number).total_byte_size for number in range(parquet.num_row_groups))


@contextmanager
def _damaged(path: Path | str) -> Iterator[None]:
    """What pyarrow says of a file, as one sentence."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError) as error:  # ValueError: text that is no UTF-8, a date without a year
        raise LmgymError(f"{path}: not readable as {Path(path).suffix or 'rows'}: {reason(error)}") from error


def _library(path: Path) -> Any:
    """pyarrow. Raises LmgymError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise LmgymError(f"{path}: a {path.suffix} file needs pyarrow: pip install 'lmgym[data]'") from error
    return pyarrow
