"""`jsonl`: any JSON Lines file as a task; and the reader, whose errors name the line."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.core.files import lines_of, open_regular
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import SPLITS, MissingSplit, check_split, hash_fraction
from lmgym.tasks.prompt_forms import own_texts
from lmgym.tasks.streamed import StreamedExamples, find_lines
from lmgym.types import Example

Row = tuple[int, dict[str, Any]]  # line number (from 1) and the object on that line
ROLES = ("system", "user", "assistant")


@register("task", "jsonl")
@own_texts
def jsonl(
    split: str,
    path: str | Path,
    prompt: str = "prompt",
    references: str | None = "references",
    id: str | None = None,
    test_path: str | Path | None = None,
    validation_path: str | Path | None = None,
    validation: float = 0.0,
    test: float = 0.1,
    streaming: bool = False,
) -> Sequence[Example]:
    """Each row of a .jsonl file becomes an Example. `prompt`, `references` and `id` are column names; all other columns
    go to `meta`.

    A prompt is a text or a list of chat messages. References are a text, a number, a list of these, or missing
    (`references: null`: no references). Without `id`, the id is made of file and line. Blank lines are skipped.

    Splits: a `path` with "{split}" names one file per split; `test_path` and `validation_path` name separate files. A
    split without a file is taken out of `path`: the fractions `validation` and `test`, by a hash of the prompt. So rows
    may be added or reordered, and equal prompts are never in two splits.

    With `streaming` the rows stay in the file, and each is read when it is asked for (tasks/streamed.py). The file is
    read once to find its lines; an error in a row behind the first ones then ends the run when the row's turn comes,
    unless splits are taken out of `path`, for which every row is read at the beginning. `id` is refused, since ids
    that must be compared would be in memory.

    Raises LmgymError with file and line for data that cannot be read.

    Example, the SVAMP dataset in its original format:
        >>> load_task("jsonl", "train", path="svamp.jsonl", prompt="Question", references="Answer", id="ID")
    """
    check_split("jsonl", split)
    if validation < 0 or test < 0 or validation + test >= 1:
        raise LmgymError(
            f"task.validation ({validation}) and task.test ({test}) must be shares that leave some to train on"
        )
    # 1. The file of the split, if it has one of its own.
    pattern = str(path)
    files: dict[str, str | Path | None] = {"validation": validation_path, "test": test_path}
    if "{split}" in pattern:
        files = {part: files.get(part) or pattern.replace("{split}", part) for part in SPLITS}
    elif split != "train" and not files[split] and not {"validation": validation, "test": test}[split]:
        raise MissingSplit(f"task 'jsonl' has no split '{split}': set task.{split}_path, or task.{split} above 0")
    file = files.get(split)
    source = Path(file or pattern).expanduser()
    if "{split}" in pattern and not source.is_file():
        raise MissingSplit(f"task 'jsonl' has no split '{split}': there is no file {source}")
    stem = f"{source.stem}/{split}" if file else source.stem
    if streaming and source.suffix == ".gz":
        raise LmgymError(f"task.streaming: {source} is compressed, and its lines can only be read in turn; gunzip it")
    if streaming and id is not None:
        raise LmgymError("task.id cannot be checked for ids that come twice with task.streaming; remove one of them")
    # 2. Else the part of `path` whose hashes are in the split's range: [0, test), [test, validation), the rest.
    test_end = 0.0 if files["test"] else test
    validation_end = test_end + (0.0 if files["validation"] else validation)

    def is_own(example: Example) -> bool:
        fraction = hash_fraction(str(example.prompt))
        return split == ("test" if fraction < test_end else "validation" if fraction < validation_end else "train")

    def read(number: int, line: bytes) -> Example:
        return _example(number, json_object(line, source, number), source, stem, prompt, references, id)

    if streaming:
        all_own = bool(file) or (split == "train" and validation_end == 0)
        choose = None if all_own else lambda number, line: is_own(read(number, line))
        return StreamedExamples(find_lines(source, choose), read)
    examples = _examples(source, stem, prompt, references, id)
    return examples if file else [example for example in examples if is_own(example)]


def read_json_lines(path: Path) -> Iterator[Row]:
    """Line number and object of each line that is not blank.

    Raises LmgymError "PATH:LINE: ..." for a line that is not UTF-8, not JSON or not an object, and for text that no
    tokenizer can encode (half of a surrogate pair).
    """
    try:
        with open_regular(path) as file:
            for number, raw in enumerate(lines_of(file, path), start=1):
                if not raw.strip():
                    continue
                yield number, json_object(raw, path, number)
    except OSError as error:
        raise LmgymError(f"cannot read {path}: {error.strerror or error}") from error


def json_object(raw: bytes, path: Path, line: int) -> dict[str, Any]:
    """The JSON object of one line's bytes. Raises LmgymError with file and line, as `parse_json` does, for others."""
    row = parse_json(raw, path, line)
    if not isinstance(row, dict):
        raise LmgymError(f"{path}:{line}: expected an object like {{...}}, got {type(row).__name__}")
    return row


def parse_json(raw: bytes, path: Path, line: int | None = None) -> Any:
    """The JSON value of a file's bytes, or of one line's bytes (`line` counts from 1).

    Raises LmgymError, with file and line, if they are not UTF-8, not JSON, or hold half of a surrogate pair.
    """
    try:
        text = raw.decode("utf-8" if (line or 1) > 1 else "utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair, which only an escape can write, fails to encode
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and deep nesting
        raise _unreadable(error, path, line) from error


def _unreadable(error: Exception, path: Path, line: int | None) -> LmgymError:
    where = path if line is None else f"{path}:{line}"
    if isinstance(error, UnicodeDecodeError):
        unit = "" if line is None else " of the line"
        return LmgymError(f"{where}: not UTF-8 (byte {error.start + 1}{unit})")
    if isinstance(error, UnicodeEncodeError):
        return LmgymError(f"{where}: holds half of a surrogate pair, which is no character")
    if isinstance(error, json.JSONDecodeError):
        return LmgymError(f"{path}:{line or error.lineno}: not valid JSON: {error.msg} at column {error.colno}")
    return LmgymError(f"{where}: not readable as JSON: {error}")


def column(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of a column. Raises LmgymError if the row does not have it; `where` is "PATH:LINE" for the message."""
    if name not in row:
        raise LmgymError(f"{where}: there is no column '{name}'; {suggest(name, row)}")
    return row[name]


def _examples(path: Path, stem: str, prompt: str, references: str | None, id: str | None) -> list[Example]:
    examples, lines = [], dict[str, int]()
    for number, row in read_json_lines(path):
        example = _example(number, row, path, stem, prompt, references, id)
        if (name := example.id) in lines:
            raise LmgymError(
                f"{path}:{number}: the id '{name}' is that of line {lines[name]} already; ids must be unique"
            )
        lines[name] = number
        examples.append(example)
    return examples


def _example(
    number: int, row: Mapping[str, Any], path: Path, stem: str, prompt: str, references: str | None, id: str | None
) -> Example:
    where = f"{path}:{number}"
    return Example(
        id=f"{stem}/{number}" if id is None else _id(column(row, id, where), id, where),
        prompt=prompt_of(row, prompt, where),
        references=_references(row, references, where),
        meta={key: value for key, value in row.items() if key not in (prompt, references, id)},
    )


def _id(value: Any, name: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise LmgymError(f"{where}: column '{name}' must hold a text or a whole number as id, got {represent(value)}")
    return str(value)


def prompt_of(row: Mapping[str, Any], name: str, where: str) -> str | Sequence[Mapping[str, str]]:
    """The prompt in a column of a row, checked: a text, or a list of chat messages. Raises LmgymError for anything
    else; `where` is "PATH:LINE" for the message."""
    value = column(row, name, where)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise LmgymError(
            f"{where}: column '{name}' must hold a text or a list of chat messages, got {represent(value)}"
        )
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in ROLES:
            raise LmgymError(
                f"{where}: a message in column '{name}' must have a role ({', '.join(ROLES)}) and a content, "
                f"nothing else, got {represent(message)}"
            )
        if not isinstance(message["content"], str):
            raise LmgymError(
                f"{where}: a message's content in column '{name}' must be a text, got {represent(message['content'])}"
            )
    if value[-1]["role"] != "user":
        raise LmgymError(f"{where}: the last message in column '{name}' must be the user's, for the model to answer")
    return value


def _references(row: Mapping[str, Any], name: str | None, where: str) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in row and name == "references":
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.8)
        if near:  # the default column is optional, but a spelling error must not lose all references
            raise LmgymError(
                f"{where}: there is no column 'references' but '{near[0]}': set task.references to it, or to null"
            )
        return ()
    value = column(row, name, where)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise LmgymError(
                f"{where}: column '{name}' must hold a text, a number or a list of these, got {represent(item)}"
            )
    return tuple(str(item) for item in values)
