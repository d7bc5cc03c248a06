"""Rows of a data set in its original format: from a local file or folder, or from the Hugging Face Hub. Each comes with
where it stands, for the error that names it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmgym.errors import LmgymError
from lmgym.tasks.base import SPLITS, MissingSplit
from lmgym.tasks.jsonl import column, read_json_lines

Row = tuple[str, dict[str, Any]]  # "PATH:LINE", and the object


def rows(task: str, part: str, path: str | Path | None, hub_id: str, config: str | None = None) -> list[Row]:
    """The rows of `part`, of the local `path` if there is one (see `local_rows`), else of the Hub's `hub_id`.

    Example:
        >>> rows("gsm8k", "test", "data/gsm8k", "openai/gsm8k", "main")[0]
        ('data/gsm8k/test.jsonl:1', {'question': '...', 'answer': '...'})
    """
    return _from_hub(task, part, hub_id, config) if path is None else local_rows(task, part, Path(path).expanduser())


def local_rows(task: str, part: str, path: Path) -> list[Row]:
    """The rows of `part` ("train", "validation", "test") that lie at `path`.

    A path with "{split}" in it names one file a part. A folder holds PART.jsonl, or a folder PART of .json files with
    one object each. A single file (.jsonl, or .json with a list of objects) serves the part that its name holds, such
    as test.jsonl, and otherwise train. Raises MissingSplit where that is another part, LmgymError for what cannot be
    read.

    Example:
        >>> local_rows("math", "train", Path("MATH"))[0][0]
        'MATH/train/algebra/1.json'
    """
    if "{split}" in str(path):
        path = Path(str(path).replace("{split}", part))
        if not path.is_file():
            raise MissingSplit(f"task '{task}' has no split '{part}': there is no file {path}")
        return _file_rows(path)
    if path.is_dir():
        if (path / part).is_dir():
            files = sorted((path / part).rglob("*.json"), key=lambda file: [_by_number(word) for word in file.parts])
            return [(str(file), _object(_json(file), str(file))) for file in files]
        file = path / f"{part}.jsonl"
        if not file.is_file():
            raise MissingSplit(f"task '{task}' has no split '{part}': there is no file {file}")
        return _file_rows(file)
    holds = split_of(path) or "train"
    if path.is_file() and holds != part:
        raise MissingSplit(
            f"task '{task}' has no split '{part}': {path} holds {holds}; give the folder of both files as task.path"
        )
    return _file_rows(path)


def split_of(path: Path) -> str | None:
    """The split that a file's name holds.

    Example:
        >>> split_of(Path("math500_test.jsonl")), split_of(Path("SVAMP.json"))
        ('test', None)
    """
    return next((word for word in re.split("[^a-z]+", path.stem.lower()) if word in SPLITS), None)


def text_of(row: Row, names: Sequence[str]) -> str:
    """The text in the first of the columns `names` that the row has. Raises LmgymError if it is none, or empty."""
    where, values = row
    name = next((name for name in names if name in values), names[0])
    value = column(values, name, where)
    if not isinstance(value, str) or not value.strip():
        raise LmgymError(f"{where}: column '{name}' must hold a text, got {value!r}")
    return value


def _file_rows(path: Path) -> list[Row]:
    if path.suffix != ".json":
        return [(f"{path}:{number}", row) for number, row in read_json_lines(path)]
    found = _json(path)
    if not isinstance(found, list):
        raise LmgymError(f"{path}: expected a list of objects like [{{...}}, ...], got {type(found).__name__}")
    return [
        (f"{path}: row {number}", _object(row, f"{path}: row {number}")) for number, row in enumerate(found, start=1)
    ]


def _json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LmgymError(f"{path}: not UTF-8 (byte {error.start + 1})") from error
    except UnicodeEncodeError as error:
        raise LmgymError(f"{path}: holds half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        raise LmgymError(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless nesting
        raise LmgymError(f"{path}: not readable as JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LmgymError(f"{where}: expected an object like {{...}}, got {type(value).__name__}")
    return value


def _by_number(word: str) -> tuple[int, str]:
    """Sorts 2.json before 10.json."""
    number = re.match("[0-9]+", word)
    return (int(number[0]) if number else -1, word)


def _from_hub(task: str, part: str, hub_id: str, config: str | None) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise LmgymError(
            f"task '{task}' needs the datasets library: pip install 'lmgym[data]', or set task.path"
        ) from error
    try:
        found = datasets.load_dataset(hub_id, config, split=part)
    except Exception as error:  # the library raises its own, the Hub client's, pyarrow's and the system's errors
        reason = str(error).strip().split("\n")[0]
        raise LmgymError(f"task.hub_id: cannot load '{hub_id}' ({type(error).__name__}: {reason})") from error
    return [(f"{hub_id}:{number}", dict(row)) for number, row in enumerate(found, start=1)]
