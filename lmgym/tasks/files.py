"""Local files of datasets in their original formats: which files hold a split, and their rows, each with file and line.

All formats except .json and .xml are read row by row, so a large file is never in memory as a whole. Nothing but a
regular file is read, and no line without an end."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.files import lines_of as file_lines
from lmgym.core.files import open_regular, read_bytes
from lmgym.core.registry import suggest
from lmgym.tasks.base import MissingSplit
from lmgym.tasks.jsonl import parse_json, read_json_lines

Row = tuple[str, dict[str, Any]]  # "PATH:LINE", and the object
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")  # in the order of preference
NAMES: Mapping[str, Sequence[str]] = {  # names that datasets use for the splits
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
SHARD = re.compile(r"-[0-9]+-of-[0-9]+\.")
LONGEST_JSON = 2**30  # bytes
LONGEST_XML = 2**28
LONGEST_FIELD = 2**26  # characters of a .csv field; Python's default, 2**17, is too small for a long article


def split_named(path: Path) -> str | None:
    """The split named in a file's name, by any of the usual names; None if it names none.

    Example:
        >>> split_named(Path("totto_dev_data.jsonl")), split_named(Path("validation-00000-of-00001.parquet"))
        ('validation', 'validation')
    """
    words = _words(path)
    return next((part for part, names in NAMES.items() if words & set(names)), None)


def files_of(
    task: str, part: str, path: Path, suffixes: Sequence[str] = SUFFIXES, names: Mapping[str, Sequence[str]] = NAMES
) -> list[Path]:
    """The files of the split `part` ("train", "validation", "test"), in reading order.

    `path` may be a pattern, a folder or a file. In a pattern "{split}" is replaced by each of the split's `names`; the
    first existing file is taken. A folder has a subfolder of such a name, or files with such a word in their names: one
    file, or the shards of one (train-00000-of-00002.parquet), of the first of the `suffixes` that occurs. A single file
    holds the split in its name, else train.

    Raises MissingSplit if the split is missing, LmgymError if the path is missing or a folder has several files for the
    split.

    Example:
        >>> files_of("totto", "validation", Path("totto"), (".jsonl",))
        [PosixPath('totto/totto_dev_data.jsonl')]
    """
    if "{split}" in str(path):
        candidates = [Path(str(path).replace("{split}", name)) for name in names[part]]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise MissingSplit(f"task '{task}' has no split '{part}': there is no file {_either(candidates)}")
        return [found]
    if path.is_dir():
        return _in_folder(task, part, path, suffixes, names)
    if not path.is_file():
        raise LmgymError(f"task.path: there is no file or folder {path}")
    holds = split_named(path) or "train"
    if holds != part:
        raise MissingSplit(f"task '{task}' has no split '{part}': {path} holds {holds}; give a folder as task.path")
    return [path]


def rows_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a .jsonl, .json (a list of objects), .csv, .tsv, .parquet or .xml (WebNLG's) file.

    `columns` are the column names of a .tsv without a header line. A .csv or .tsv may be compressed (.gz). Raises
    LmgymError, with file and line, for data that cannot be read.

    Example:
        >>> next(rows_of(Path("cnn_dailymail/validation.csv")))
        ('cnn_dailymail/validation.csv:2', {'article': '...', 'highlights': '...', 'id': '...'})
    """
    readers: dict[str, Callable[[], Iterator[Row]]] = {
        ".jsonl": lambda: ((f"{path}:{number}", row) for number, row in read_json_lines(path)),
        ".json": lambda: _listed(path),
        ".csv": lambda: _table(path, ",", None),
        ".tsv": lambda: _table(path, "\t", columns),
        ".parquet": lambda: _parquet(path),
        ".xml": lambda: _entries(path),
    }
    packed = path.suffix == ".gz" and Path(path.stem).suffix in (".csv", ".tsv")
    kind = Path(path.stem).suffix if packed else path.suffix
    if kind not in readers:
        raise LmgymError(f"{path}: cannot read a file that ends in '{kind}'; {suggest(kind, readers)}")
    return readers[kind]()


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of a text file (compressed if its name ends in .gz), without its line end: ("PATH:LINE", line).

    Example:
        >>> next(lines_of(Path("multi30k/train.en.gz")))
        ('multi30k/train.en.gz:1', 'Two young, White males are outside near many bushes.')
    """
    for number, line in enumerate(_decoded(path), start=1):
        yield f"{path}:{number}", line.removesuffix("\n").removesuffix("\r")


def read_json(path: Path) -> Any:
    """The value in a .json file. Raises LmgymError, with file and line, if it cannot be read."""
    try:
        raw = read_bytes(path, LONGEST_JSON)
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror}") from error
    return parse_json(raw, path)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value, checked to be a JSON object. Raises LmgymError with `where` (file and line) if it is not."""
    if not isinstance(value, dict):
        raise LmgymError(f"{where}: expected an object like {{...}}, got {type(value).__name__}")
    return value


def _in_folder(
    task: str, part: str, folder: Path, suffixes: Sequence[str], names: Mapping[str, Sequence[str]]
) -> list[Path]:
    """`files_of` for a folder."""
    # A subfolder of the split's name comes first.
    for name in names[part]:
        if (folder / name).is_dir():
            below = sorted(file for file in (folder / name).rglob("*") if file.suffix in suffixes)
            if below:
                return below
    # Else files with the split in their names: the first suffix that occurs, one file or all shards of one.
    named = sorted(file for file in folder.iterdir() if file.is_file() and _words(file) & set(names[part]))
    for suffix in suffixes:
        files = [file for file in named if file.suffix == suffix]
        if len(files) > 1 and not all(SHARD.search(file.name) for file in files):
            raise LmgymError(
                f"task.path: {folder} holds several files for split '{part}': {', '.join(f.name for f in files)}; "
                "name one of them, or give a pattern with {split}"
            )
        if files:
            return files
    raise MissingSplit(
        f"task '{task}' has no split '{part}': in {folder} there is no file whose name holds {_either(names[part])} "
        f"and ends in {_either(suffixes)}"
    )


def _listed(path: Path) -> Iterator[Row]:
    """The objects of a .json file's list."""
    objects = read_json(path)
    if not isinstance(objects, list):
        raise LmgymError(f"{path}: expected a list of objects like [{{...}}, ...], got {type(objects).__name__}")
    for number, row in enumerate(objects, start=1):
        yield f"{path}: row {number}", as_object(row, f"{path}: row {number}")


def _table(path: Path, delimiter: str, columns: Sequence[str] | None) -> Iterator[Row]:
    """The rows of a .csv or .tsv file. In a .tsv a quotation mark is an ordinary character."""
    csv.field_size_limit(LONGEST_FIELD)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(_decoded(path), delimiter=delimiter, quoting=quoting, strict=True)
    line = 1
    try:
        for fields in reader:
            where, line = f"{path}:{line}", reader.line_num + 1  # a quoted field may span lines; name its first
            if not fields:
                continue
            if columns is None:
                columns = fields
                continue
            if len(fields) != len(columns):
                raise LmgymError(
                    f"{where}: {len(fields)} fields, expected {len(columns)}: {', '.join(map(repr, columns))}"
                )
            yield where, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise LmgymError(f"{path}:{line}: not readable as {path.suffix}: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise LmgymError(f"{path}: a .parquet file needs pyarrow: pip install 'lmgym[data]'") from error
    number = 0
    try:
        with open_regular(path) as opened, ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LmgymError(f"{path}: not readable as .parquet after row {number}: {reason}") from error


def _entries(path: Path) -> Iterator[Row]:
    """The entries of a WebNLG .xml file (DART's .xml has the same form), in the form of DART's .json."""
    from xml.etree import ElementTree

    number = 0
    try:
        file = io.BytesIO(read_bytes(path, LONGEST_XML))
        for _, element in ElementTree.iterparse(file):
            if element.tag != "entry":
                continue
            number += 1
            triples = [(triple.text or "").split(" | ") for triple in element.iterfind("modifiedtripleset/mtriple")]
            texts = [{"text": (text.text or "").strip()} for text in element.iterfind("lex")]
            yield (
                f"{path}: entry {number}",
                {
                    "tripleset": [[part.strip() for part in triple] for triple in triples],
                    "annotations": texts,
                    "category": element.get("category"),
                },
            )
            element.clear()
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror}") from error
    except ElementTree.ParseError as error:
        raise LmgymError(f"{path}:{error.position[0]}: not valid XML: {error}") from error


def _decoded(path: Path) -> Iterator[str]:
    """Lines with their line ends. Only \\n ends a line; str.splitlines would also split at a \\u2028 in a sentence."""
    number = 0
    try:
        with _opened(path) as file:
            for raw in file_lines(file, path):
                number += 1
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise LmgymError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except (OSError, EOFError, zlib.error) as error:  # gzip raises each of them, for truncated or wrong files
        raise LmgymError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _opened(path: Path) -> IO[bytes]:
    file = open_regular(path)
    return gzip.open(file) if path.suffix == ".gz" else file  # type: ignore[return-value]


def _words(path: Path) -> set[str]:
    """The words of a file's name, and the whole name before its first dot."""
    name = path.name.lower()
    return {*re.split("[^a-z]+", name), name.split(".")[0]}


def _either(words: Sequence[Any]) -> str:
    return " or ".join([", ".join(map(str, words[:-1])), str(words[-1])] if len(words) > 1 else map(str, words))
