"""`gsm8k`: GSM8K, grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168): 7,473 train, 1,319 test."""

import re
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, check_split
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import text_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.types import Example

CALCULATOR = re.compile(r"<<[^<>\n]*>>")


@register("task", "gsm8k")
def gsm8k(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "openai/gsm8k",
    validation: float = 0.0,
    strip_calculator: bool = False,
) -> list[Example]:
    """The prompt is the question, the reference the worked solution ("... #### 18"); meta["answer"] is the number as it
    stands there ("1,002").

    `path` is a folder with train.jsonl and test.jsonl of {"question", "answer"}, as in the original, a clone of the
    Hub's data set, or one such file: the split is the one in its name (test.jsonl: test), else train. Without `path`
    the data comes from the Hugging Face Hub.

    The dataset has no validation split. With `validation` above 0, that fraction at the end of train becomes
    validation. `strip_calculator` removes the <<48/2=24>> marks from the references.

    Example:
        >>> load_task("gsm8k", "test", path="data/gsm8k", limit=200, system_prompt="Think first. End with #### N.")
    """
    check_split("gsm8k", split)
    if not 0 <= validation < 1:
        raise LmgymError(f"task.validation must be a share of train, at least 0 and below 1, not {validation}")
    if split == "validation" and not validation:
        raise MissingSplit("task 'gsm8k' has no split 'validation': set task.validation above 0 to take it from train")
    part = "test" if split == "test" else "train"
    rows = load_rows("gsm8k", part, path, hub_id, "main")
    examples = list(fitting(rows, lambda index, row: _example(row, f"gsm8k/{part}/{index}", strip_calculator)))
    kept = len(examples) - round(validation * len(examples))
    return examples if split == "test" else examples[:kept] if split == "train" else examples[kept:]


def _example(row: Row, id: str, strip_calculator: bool) -> Example:
    question, answer = (text_of(row, [name]) for name in ("question", "answer"))
    _, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        raise LmgymError(f"{row[0]}: the answer does not end in '#### NUMBER'")
    reference = CALCULATOR.sub("", answer) if strip_calculator else answer
    return Example(id=id, prompt=question, references=(reference,), meta={"answer": final.strip()})
