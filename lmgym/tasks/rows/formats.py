"""The rows of one file: .jsonl, .json, .csv, .tsv, .parquet, .arrow or .xml, each with file and line.

All formats except .json and .xml are read row by row, so a large file is never in memory as a whole. Nothing but a
regular file is read, and no line without an end."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.files import LONGEST_LINE
from lmgym.core.registry import suggest
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.arrow import arrow_table, parquet_rows, table_rows
from lmgym.tasks.rows.json_text import as_object, parse_json, read_json_lines
from lmgym.tasks.rows.unfit import unreadable
from lmgym.tasks.rows.unpacked import kind_of, opened, text_lines

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # in the order of preference
LONGEST_JSON = 2**30  # bytes
LONGEST_XML = 2**28
LONGEST_FIELD = 2**26  # characters of a .csv field; Python's default, 2**17, is too small for a long article
PLACE = re.compile(r"(.*):(?: row | entry )?([0-9]+)", re.DOTALL)
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
TRUTH = {"true": True, "false": False}
NOTHING = ("", "null", "None")  # cells without a value, in a column of numbers or of true and false


def rows_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a file (WebNLG's .xml too). It may be compressed (.gz, .xz, .zst), or a member of an archive
    ("rows.zip/train.jsonl").

    `columns` are the column names of a .tsv without a header line. Cells of .csv and .tsv are typed by column: where
    all of them are whole numbers, numbers, or true and false, they are read as such, "null" and empty ones as None; all
    other columns are texts. Raises LmgymError, with file and line, for data that cannot be read; `unreadable` is told
    of rows that cannot, and the others follow.

    Example:
        >>> next(rows_of(Path("cnn_dailymail/validation.csv")))
        ('cnn_dailymail/validation.csv:2', {'article': '...', 'highlights': '...', 'id': '...'})
    """
    readers: dict[str, Callable[[], Iterator[Row]]] = {
        ".jsonl": lambda: read_json_lines(path),
        ".json": lambda: _json(path),
        ".csv": lambda: _table(path, ",", None),
        ".tsv": lambda: _table(path, "\t", columns),
        ".parquet": lambda: parquet_rows(path),
        ".arrow": lambda: table_rows(arrow_table(path), path),
        ".xml": lambda: _entries(path),
    }
    readers[".ndjson"] = readers[".jsonl"]
    if (kind := kind_of(path)) not in readers:
        raise LmgymError(f"{path}: cannot read a file that ends in '{kind}'; {suggest(kind, readers)}")
    return readers[kind]()


def read_json(path: Path) -> Any:
    """The value in a .json file. Raises LmgymError, with file and line, if it cannot be read."""
    return parse_json(_whole(path, LONGEST_JSON), path)


def place_of(where: str) -> tuple[str, int]:
    """The file of a row, and its number in it. Example: place_of("rows.parquet: row 12") -> ("rows.parquet", 12)"""
    found = PLACE.fullmatch(where)
    return (found[1], int(found[2])) if found else (where, 1)


def _whole(path: Path, most: int) -> bytes:
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise LmgymError(f"cannot read {path}: it is longer than {most:,} bytes")
    return data


def _json(path: Path) -> Iterator[Row]:
    """The objects of a .json file: of a list, of lines (as .jsonl has them), or one."""
    with opened(path) as file:
        first = next((line for line in iter(lambda: file.readline(LONGEST_LINE), b"") if line.strip()), b"")
    if first.lstrip(b"\xef\xbb\xbf").strip().startswith(b"{"):
        try:
            parse_json(first, path, 1)
        except LmgymError:  # an object of several lines
            yield str(path), as_object(read_json(path), str(path))
            return
        yield from read_json_lines(path)
        return
    objects = read_json(path)
    if not isinstance(objects, list):
        raise LmgymError(f"{path}: expected a list of objects like [{{...}}, ...], got {type(objects).__name__}")
    for number, row in enumerate(objects, start=1):
        where = f"{path}: row {number}"
        try:
            found = as_object(row, where)
        except LmgymError as error:
            unreadable(where, error)
        else:
            yield where, found


def _table(path: Path, delimiter: str, columns: Sequence[str] | None) -> Iterator[Row]:
    """The rows of a .csv or .tsv file, with typed cells unless its columns have no names."""
    if columns is not None:
        for where, cells in _cells(path, delimiter, columns):
            yield where, dict(zip(columns, cells, strict=True))
        return
    rows = _cells(path, delimiter)
    _, names = next(rows, ("", []))
    if double := next((name for name in names if names.count(name) > 1), None):
        raise LmgymError(f"{path}:1: two columns are called '{double}'; rename one")
    kinds = _kinds(_cells(path, delimiter, other=lambda where, error: None), len(names))
    for where, cells in rows:
        typed = (kind(cell) for kind, cell in zip(kinds, cells, strict=True))
        yield where, dict(zip(names, typed, strict=True))


def _cells(
    path: Path,
    delimiter: str,
    columns: Sequence[str] | None = None,
    other: Callable[[str, LmgymError], None] = unreadable,
) -> Iterator[tuple[str, list[str]]]:
    """The cells of each row; the first row is the names, unless `columns` are. In a .tsv a quotation mark is an
    ordinary character."""
    csv.field_size_limit(LONGEST_FIELD)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(text_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
    line = 1
    try:
        for cells in reader:
            where, line = f"{path}:{line}", reader.line_num + 1  # a quoted field may span lines; name its first
            if not cells:
                continue
            columns = cells if columns is None else columns
            if len(cells) == len(columns):
                yield where, cells
            else:
                named = ", ".join(map(repr, columns))
                other(where, LmgymError(f"{where}: {len(cells)} fields, expected {len(columns)}: {named}"))
    except csv.Error as error:
        raise LmgymError(f"{path}:{line}: not readable as {kind_of(path)}: {error}") from error


def _kinds(rows: Iterator[tuple[str, list[str]]], count: int) -> list[Callable[[str], Any]]:
    """For each column what makes a value of its cells: the first of true and false, whole numbers and numbers that all
    cells are as they stand."""
    left: list[list[Callable[[str], Any]]] = [[_truth, _whole_number, _number] for _ in range(count)]
    some = [False] * count
    next(rows, None)  # the names
    for _, cells in rows:
        for place, cell in enumerate(cells):
            if left[place] and cell not in NOTHING:
                left[place] = [kind for kind in left[place] if kind(cell) is not None]
                some[place] = True
        if not any(left):
            break
    return [kinds[0] if kinds and any_cell else str for kinds, any_cell in zip(left, some, strict=True)]


def _truth(cell: str) -> bool | None:
    return TRUTH.get(cell.lower())


def _whole_number(cell: str) -> int | None:
    return int(cell) if WHOLE.fullmatch(cell) else None


def _number(cell: str) -> float | int | None:
    """A number that is written again as it stands in the file: 0.5, but neither 0.50 nor 007."""
    try:
        whole, number = _whole_number(cell), float(cell)
    except ValueError:
        return None
    return whole if whole is not None else number if repr(number) == cell else None


def _entries(path: Path) -> Iterator[Row]:
    """The entries of a WebNLG .xml file (DART's .xml has the same form), in the form of DART's .json."""
    import io
    from xml.etree import ElementTree

    try:
        elements = (element for _, element in ElementTree.iterparse(io.BytesIO(_whole(path, LONGEST_XML))))
        entries = (element for element in elements if element.tag == "entry")
        for number, entry in enumerate(entries, start=1):
            triples = [(triple.text or "").split(" | ") for triple in entry.iterfind("modifiedtripleset/mtriple")]
            row = {
                "tripleset": [[part.strip() for part in triple] for triple in triples],
                "annotations": [{"text": (text.text or "").strip()} for text in entry.iterfind("lex")],
                "category": entry.get("category"),
            }
            yield f"{path}: entry {number}", row
            entry.clear()
    except ElementTree.ParseError as error:
        raise LmgymError(f"{path}:{error.position[0]}: not valid XML: {error}") from error
