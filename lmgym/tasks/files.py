"""Files of data sets in their original formats: which of them hold a split, and their rows, each with where it stands.

Everything but .json is read as it is asked for, so a large file never lies in memory as a whole."""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.tasks.base import MissingSplit
from lmgym.tasks.jsonl import parse_json, read_json_lines

Row = tuple[str, dict[str, Any]]  # "PATH:LINE", and the object
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")  # in the order of preference
NAMES: Mapping[str, Sequence[str]] = {  # what data sets call the splits
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
SHARD = re.compile(r"-[0-9]+-of-[0-9]+\.")
LONGEST_FIELD = 2**26  # of a .csv; the module's own limit, 2**17, is less than a long article


def split_named(path: Path) -> str | None:
    """The split that a file's name holds, whichever word its authors use for it.

    Example:
        >>> split_named(Path("totto_dev_data.jsonl")), split_named(Path("validation-00000-of-00001.parquet"))
        ('validation', 'validation')
    """
    words = _words(path)
    return next((part for part, names in NAMES.items() if words & set(names)), None)


def files_of(
    task: str, part: str, path: Path, suffixes: Sequence[str] = SUFFIXES, names: Mapping[str, Sequence[str]] = NAMES
) -> list[Path]:
    """The files that hold `part` ("train", "validation", "test"), in the order in which they are to be read.

    A path with "{split}" in it names one file a part: the first of the part's `names` for which there is one. A folder
    holds them in a folder of that name, or in files whose names hold one of the words: one file, or the shards of one
    (train-00000-of-00002.parquet), of the first suffix for which there is any. A single file serves the part that its
    name holds, and otherwise train.

    Raises MissingSplit where the part is not there, LmgymError where the path is not, or holds several files for it.

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

    `columns` name the columns of a .tsv that has no first line with their names. A .csv or .tsv may be packed (.gz).
    Raises LmgymError, with file and line, for what cannot be read.

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
    """Each line of a text file (packed if it ends in .gz) with where it stands, without its end.

    Example:
        >>> next(lines_of(Path("multi30k/train.en.gz")))
        ('multi30k/train.en.gz:1', 'Two young, White males are outside near many bushes.')
    """
    for number, line in enumerate(_decoded(path), start=1):
        yield f"{path}:{number}", line.removesuffix("\n").removesuffix("\r")


def read_json(path: Path) -> Any:
    """What a .json file holds. Raises LmgymError, with file and line, for what cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror}") from error
    return parse_json(raw, path)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value, if it is an object; LmgymError naming `where` if it is none."""
    if not isinstance(value, dict):
        raise LmgymError(f"{where}: expected an object like {{...}}, got {type(value).__name__}")
    return value


def _in_folder(
    task: str, part: str, folder: Path, suffixes: Sequence[str], names: Mapping[str, Sequence[str]]
) -> list[Path]:
    for name in names[part]:
        if (folder / name).is_dir():
            below = sorted(file for file in (folder / name).rglob("*") if file.suffix in suffixes)
            if below:
                return below
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
    found = read_json(path)
    if not isinstance(found, list):
        raise LmgymError(f"{path}: expected a list of objects like [{{...}}, ...], got {type(found).__name__}")
    for number, row in enumerate(found, start=1):
        yield f"{path}: row {number}", as_object(row, f"{path}: row {number}")


def _table(path: Path, delimiter: str, columns: Sequence[str] | None) -> Iterator[Row]:
    """Rows of separated fields. Where tabs separate, a quotation mark is a character as any other."""
    csv.field_size_limit(LONGEST_FIELD)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(_decoded(path), delimiter=delimiter, quoting=quoting, strict=True)
    line = 1
    try:
        for fields in reader:
            where, line = f"{path}:{line}", reader.line_num + 1
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
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LmgymError(f"{path}: not readable as .parquet after row {number}: {reason}") from error


def _entries(path: Path) -> Iterator[Row]:
    """The entries of a file of the WebNLG challenge (DART's .xml has the same form), as DART's .json has them."""
    from xml.etree import ElementTree

    number = 0
    try:
        for _, element in ElementTree.iterparse(path):
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
    """Lines with their ends. Only \\n ends one: str.splitlines would also do so at a \\u2028 inside a sentence."""
    number = 0
    try:
        with _opened(path) as file:
            for raw in file:
                number += 1
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise LmgymError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three for a file that is cut off or none of its
        raise LmgymError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _words(path: Path) -> set[str]:
    """The words of a file's name, and all that stands before its first dot."""
    name = path.name.lower()
    return {*re.split("[^a-z]+", name), name.split(".")[0]}


def _either(words: Sequence[Any]) -> str:
    return " or ".join([", ".join(map(str, words[:-1])), str(words[-1])] if len(words) > 1 else map(str, words))
