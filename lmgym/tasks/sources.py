"""Rows of a dataset in its original format, from a local file or folder or from the Hugging Face Hub; each row comes
with file and line, for error messages."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.hub import prepare_hub, unreachable
from lmgym.tasks.base import SPLITS, MissingSplit, check_split, hash_fraction
from lmgym.tasks.files import NAMES, SUFFIXES, Row, as_object, files_of, read_json, rows_of
from lmgym.tasks.jsonl import column, read_json_lines
from lmgym.types import Example


def load_rows(task: str, part: str, path: str | Path | None, hub_id: str, config: str | None = None) -> list[Row]:
    """The rows of the split `part`: from `path` (see `local_rows`), or, if it is None, from the Hub's `hub_id`.

    Example:
        >>> load_rows("gsm8k", "test", "data/gsm8k", "openai/gsm8k", "main")[0]
        ('data/gsm8k/test.jsonl:1', {'question': '...', 'answer': '...'})
    """
    if path is None:
        return list(_from_hub(task, part, hub_id, config))
    return local_rows(task, part, Path(path).expanduser())


def stream_rows(
    task: str,
    part: str,
    path: str | Path | None,
    hub_id: str,
    config: str | None = None,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    columns: Sequence[str] | None = None,
    names: Mapping[str, Sequence[str]] = NAMES,
) -> Iterator[Row]:
    """`load_rows` for larger datasets and more formats. Yields one row after the other, from the files that `files_of`
    finds at `path`, or, if it is None, from the Hub. "ID@REVISION" names a branch on the Hub. In the branch
    @refs/convert/parquet the Hub keeps a copy of datasets that were once loaded by a script.

    Example:
        >>> next(stream_rows("cnn_daily_mail", "validation", "data/cnn", "abisee/cnn_dailymail", "3.0.0"))
        ('data/cnn/validation.csv:2', {'article': '...', 'highlights': '...', 'id': '...'})
    """
    if path is None:
        yield from _from_hub(task, part, hub_id, config, names[part])
        return
    for file in files_of(task, part, Path(path).expanduser(), suffixes, names):
        yield from rows_of(file, columns)


def disjoint(split: str, examples_of: Callable[[str], Iterable[Example]]) -> list[Example]:
    """The examples of a split, without prompts of later splits: prompts of test are removed from validation, and those
    of both from train. `examples_of` makes the examples of one split; it raises MissingSplit if there is no such split.

    Example:
        >>> disjoint("train", {"train": [Example("a", "1?"), Example("b", "2?")], "validation": [], "test":
        ...     [Example("c", "2?")]}.__getitem__)
        [Example(id='a', prompt='1?', references=(), meta={})]
    """
    examples = list(examples_of(split))
    held_out: set[str] = set()
    for other in SPLITS[SPLITS.index(split) + 1 :]:
        try:
            held_out |= {str(example.prompt) for example in examples_of(other)}
        except MissingSplit:
            continue
    return [example for example in examples if str(example.prompt) not in held_out]


def shared_out(
    task: str, split: str, examples_of: Callable[[str], list[Example]], validation: float, test: float
) -> list[Example]:
    """The examples of a split of data that may have one split only: the shares `validation` and `test` of the training
    prompts, by a hash, are the splits that it does not have itself. Prompts of the others are removed from train.
    `examples_of` makes the examples of one split; it raises MissingSplit if there is no such split.

    Example: of data with train and test, a tenth of train
        >>> shared_out("preferences", "validation", examples_of, validation=0.1, test=0.1)
    """
    check_split(task, split)
    if validation < 0 or test < 0 or validation + test >= 1:
        raise LmgymError(
            f"task.validation ({validation}) and task.test ({test}) must be shares that leave some to train on"
        )
    # The splits that the data has itself; the others are taken out of train.
    own = {part: found for part in SPLITS if part != "train" and (found := _or_none(examples_of, part)) is not None}
    if split in own:
        return own[split]
    shares = {part: 0.0 if part in own else share for part, share in (("test", test), ("validation", validation))}
    if split != "train" and not shares[split]:
        raise MissingSplit(f"task '{task}' has no split '{split}': set task.{split} above 0")
    held_out = {str(example.prompt) for examples in own.values() for example in examples}

    def part_of(example: Example) -> str:
        fraction = hash_fraction(str(example.prompt))
        if fraction < shares["test"]:
            return "test"
        return "validation" if fraction < shares["test"] + shares["validation"] else "train"

    return [one for one in examples_of("train") if part_of(one) == split and str(one.prompt) not in held_out]


def _or_none(examples_of: Callable[[str], list[Example]], part: str) -> list[Example] | None:
    """The examples of a split; None if the data has no such split."""
    try:
        return examples_of(part)
    except MissingSplit:
        return None


def local_rows(task: str, part: str, path: Path) -> list[Row]:
    """The rows of the split `part` ("train", "validation", "test") at `path`.

    `path` is a pattern with "{split}"; or a folder with PART.jsonl, or with a subfolder PART of .json files with one
    object each; or a single file (.jsonl, or .json with a list of objects), whose split is the one in its name (such as
    test.jsonl), else train. Raises MissingSplit if the split is not there, LmgymError for data that cannot be read.

    Example:
        >>> local_rows("math", "train", Path("MATH"))[0][0]
        'MATH/train/algebra/1.json'
    """
    if "{split}" in str(path):
        path = Path(str(path).replace("{split}", part))
        if not path.is_file():
            raise MissingSplit(f"task '{task}' has no split '{part}': there is no file {path}")
        return _listed(path)
    if path.is_dir():
        if (path / part).is_dir():
            files = sorted((path / part).rglob("*.json"), key=lambda file: [_by_number(word) for word in file.parts])
            return [(str(file), as_object(read_json(file), str(file))) for file in files]
        file = path / f"{part}.jsonl"
        if not file.is_file():
            raise MissingSplit(f"task '{task}' has no split '{part}': there is no file {file}")
        return _listed(file)
    holds = split_of(path) or "train"
    if path.is_file() and holds != part:
        raise MissingSplit(
            f"task '{task}' has no split '{part}': {path} holds {holds}; give the folder of both files as task.path"
        )
    return _listed(path)


def texts_of(texts: Iterable[object], where: str, name: str) -> tuple[str, ...]:
    """Check texts that are to be references. Raises LmgymError if there is none, or if one is empty or not a text."""
    references = tuple(texts)
    if not references:
        raise LmgymError(f"{where}: column '{name}' holds no reference")
    for text in references:
        if not isinstance(text, str) or not text.strip():
            raise LmgymError(f"{where}: a reference in column '{name}' must be a text, got {text!r}")
    return tuple(str(text) for text in references)


def split_of(path: Path) -> str | None:
    """The split named in a file's name, if it is "train", "validation" or "test".

    Example:
        >>> split_of(Path("math500_test.jsonl")), split_of(Path("SVAMP.json"))
        ('test', None)
    """
    return next((word for word in re.split("[^a-z]+", path.stem.lower()) if word in SPLITS), None)


def text_of(row: Row, names: Sequence[str]) -> str:
    """The text in the first of the columns `names` that the row has. Raises LmgymError if it is empty or not a text."""
    where, values = row
    name = next((name for name in names if name in values), names[0])
    value = column(values, name, where)
    if not isinstance(value, str) or not value.strip():
        raise LmgymError(f"{where}: column '{name}' must hold a text, got {value!r}")
    return value


def _by_number(word: str) -> tuple[int, str]:
    """A sort key that puts 2.json before 10.json."""
    number = re.match("[0-9]+", word)
    return (int(number[0]) if number else -1, word)


def _listed(path: Path) -> list[Row]:
    """The rows of a file: a list of objects if it ends in .json, else one object per line."""
    if path.suffix == ".json":
        return list(rows_of(path))
    return [(f"{path}:{number}", row) for number, row in read_json_lines(path)]


def _from_hub(task: str, part: str, hub_id: str, config: str | None, names: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a split on the Hub, by the first of its `names` that the dataset has."""
    try:
        import datasets
    except ImportError as error:
        raise LmgymError(
            f"task '{task}' needs the datasets library: pip install 'lmgym[data]', or set task.path"
        ) from error
    repository, _, revision = hub_id.partition("@")
    dataset, reason = None, ""
    prepare_hub(repository)
    for name in names or (part,):
        try:
            dataset = datasets.load_dataset(repository, config, split=name, revision=revision or None)
            break
        except Exception as error:  # errors of the library, the Hub client, pyarrow or the system
            reason = str(error).strip().split("\n")[0]
            if not reason.startswith("Unknown split"):
                why = unreachable() or f"{type(error).__name__}: {reason}"
                raise LmgymError(
                    f"task.hub_id: cannot load '{hub_id}' ({why}); where the Hub cannot be reached, set task.path to "
                    "the files"
                ) from error
    if dataset is None:
        raise MissingSplit(f"task '{task}' has no split '{part}': '{hub_id}' says: {reason}")
    number = 0
    for batch in dataset.iter(batch_size=100):  # one row at a time takes several times as long
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield f"{hub_id}:{number}", dict(zip(batch, values, strict=True))
