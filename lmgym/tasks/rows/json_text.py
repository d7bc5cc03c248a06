"""JSON and JSON Lines, with errors that name file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import lines_of
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.unfit import unreadable
from lmgym.tasks.rows.unpacked import opened


def read_json_lines(path: Path) -> Iterator[Row]:
    """The object of each line that is not blank, with file and line.

    A line that is not UTF-8, not JSON or not an object, or holds text that no tokenizer can encode (half of a surrogate
    pair), is `unreadable`."""
    with opened(path) as file:
        for number, raw in enumerate(lines_of(file, path), start=1):
            if not raw.strip():
                continue
            try:
                row = json_object(raw, path, number)
            except LmgymError as error:
                unreadable(f"{path}:{number}", error)
            else:
                yield f"{path}:{number}", row


def json_object(raw: bytes, path: Path, line: int) -> dict[str, Any]:
    """The JSON object of one line's bytes. Raises LmgymError with file and line, as `parse_json` does, for others."""
    return as_object(parse_json(raw, path, line), f"{path}:{line}")


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value, checked to be a JSON object; a list of messages becomes one with the column `messages`. Raises
    LmgymError with `where` (file and line) for others."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return {"messages": value}
    if not isinstance(value, dict):
        raise LmgymError(f"{where}: expected an object like {{...}}, got {type(value).__name__}")
    return value


def parse_json(raw: bytes, path: Path, line: int | None = None) -> Any:
    """The JSON value of a file's bytes, or of one line's bytes (`line` counts from 1).

    Raises LmgymError, with file and line, if they are not UTF-8, not JSON, or hold half of a surrogate pair."""
    try:
        text = raw.decode("utf-8" if (line or 1) > 1 else "utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair, which only an escape can write, fails to encode
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and deep nesting
        where = str(path) if line is None else f"{path}:{line}"
        if isinstance(error, UnicodeDecodeError):
            problem = f"not UTF-8 (byte {error.start + 1}{'' if line is None else ' of the line'})"
        elif isinstance(error, UnicodeEncodeError):
            problem = "holds half of a surrogate pair, which is no character"
        elif isinstance(error, json.JSONDecodeError):
            where, problem = f"{path}:{line or error.lineno}", f"not valid JSON: {error.msg} at column {error.colno}"
        else:
            problem = f"not readable as JSON: {error}"
        raise LmgymError(f"{where}: {problem}") from error
