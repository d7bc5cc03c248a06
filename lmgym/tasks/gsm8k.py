"""GSM8K, grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168): 7,473 to train on, 1,319 to test on."""

import re
from collections.abc import Iterator
from pathlib import Path

from lmgym.episode import Example
from lmgym.errors import LmgymError
from lmgym.registry import register
from lmgym.tasks.base import SPLITS, MissingSplit, check_split
from lmgym.tasks.jsonl import Row, column, read_json_lines

CALCULATOR = re.compile(r"<<[^<>\n]*>>")


@register("task", "gsm8k")
def gsm8k(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "openai/gsm8k",
    validation: float = 0.0,
    strip_calculator: bool = False,
) -> list[Example]:
    """The question as prompt, the worked solution ("... #### 18") as reference, the number in meta["answer"].

    `path` is a folder with train.jsonl and test.jsonl in the original format ({"question", "answer"} per
    line), or one such file, which serves the split that its name holds (test.jsonl: test) and otherwise
    train. Without `path` the data comes from the Hugging Face Hub.

    The set has no validation split of its own: with `validation` above 0 the last so much of train becomes
    one, and train ends before it. `strip_calculator` takes the <<48/2=24>> marks out of the references.

    Example:
        >>> load("gsm8k", "test", path="data/gsm8k", limit=200, system_prompt="Reason step by step. End with #### N.")
    """
    check_split("gsm8k", split)
    if not 0 <= validation < 1:
        raise LmgymError(f"task.validation must be a share of train, at least 0 and below 1, not {validation}")
    if split == "validation" and not validation:
        raise MissingSplit("task 'gsm8k' has no split 'validation': set task.validation above 0 to take it from train")
    part = "test" if split == "test" else "train"
    if path is None:
        source, rows = hub_id, list(_from_hub(hub_id, part))
    else:
        file = _file(Path(path).expanduser(), part)
        source, rows = str(file), list(read_json_lines(file))
    examples = [_example(row, f"gsm8k/{part}/{index}", source, strip_calculator) for index, row in enumerate(rows)]
    kept = len(examples) - round(validation * len(examples))
    return examples if split == "test" else examples[:kept] if split == "train" else examples[kept:]


def _file(path: Path, part: str) -> Path:
    if path.is_dir():
        file = path / f"{part}.jsonl"
        if not file.is_file():
            raise MissingSplit(f"task 'gsm8k' has no split '{part}': there is no file {file}")
        return file
    named = [word for word in re.split("[^a-z]+", path.stem.lower()) if word in SPLITS]
    holds = named[0] if named else "train"
    if path.is_file() and holds != part:
        raise MissingSplit(
            f"task 'gsm8k' has no split '{part}': {path} holds {holds}; give the folder of both files as task.path"
        )
    return path


def _from_hub(hub_id: str, part: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise LmgymError(
            "task 'gsm8k' needs the datasets library: pip install 'lmgym[data]', or set task.path"
        ) from error
    try:
        rows = datasets.load_dataset(hub_id, "main", split=part)
    except Exception as error:  # the library raises its own, the Hub client's, pyarrow's and the system's errors
        reason = str(error).strip().split("\n")[0]
        raise LmgymError(f"task.hub_id: cannot load '{hub_id}' ({type(error).__name__}: {reason})") from error
    yield from enumerate(rows, start=1)


def _example(row: Row, id: str, source: str, strip_calculator: bool) -> Example:
    where = f"{source}:{row[0]}"
    question, answer = (column(row[1], name, where) for name in ("question", "answer"))
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value:
            raise LmgymError(f"{where}: column '{name}' must hold a text, got {value!r}")
    _, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        raise LmgymError(f"{where}: the answer does not end in '#### NUMBER'")
    reference = CALCULATOR.sub("", answer) if strip_calculator else answer
    return Example(id=id, prompt=question, references=(reference,), meta={"answer": final.strip().replace(",", "")})
