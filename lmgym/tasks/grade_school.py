"""Word problems of grade school. `gsm8k`: GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 train, 1,319 test.
`svamp`: SVAMP, one-step problems that punish shortcuts (Patel et al. 2021, arXiv 2103.07191): 1,000 in all."""

import re
from fractions import Fraction
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, hash_fraction
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column, text_of
from lmgym.tasks.rows.find import split_named
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import split_to_read
from lmgym.types import Example

CALCULATOR = re.compile(r"<<[^<>\n]*>>")
# What Fraction reads, with as many digits as a word problem may have: of 1e9999999 it would make ten million.
NUMBER = re.compile(r"[+-]?[\d_./]{1,100}(?:[eE][+-]?\d{1,3})?")


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
    part = split_to_read("gsm8k", split, validation)
    rows = load_rows("gsm8k", part, path, hub_id, "main")
    examples = list(fitting(rows, lambda index, row: _of_gsm8k(row, f"gsm8k/{part}/{index}", strip_calculator)))
    kept = len(examples) - round(validation * len(examples))
    return examples if split == "test" else examples[:kept] if split == "train" else examples[kept:]


def _of_gsm8k(row: Row, id: str, strip_calculator: bool) -> Example:
    question, answer = (text_of(row, [name]) for name in ("question", "answer"))
    _, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        raise LmgymError(f"{row[0]}: the answer does not end in '#### NUMBER'")
    reference = CALCULATOR.sub("", answer) if strip_calculator else answer
    return Example(id=id, prompt=question, references=(reference,), meta={"answer": final.strip()})


@register("task", "svamp")
def svamp(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "ChilleD/SVAMP",
    validation: float = 0.0,
    test: float = 0.3,
) -> list[Example]:
    """The prompt is body and question, the reference equation and number ("290 / 2 = 145\\n#### 145").

    `meta` has answer, equation and type ("Subtraction", ...). Rows are {"Body", "Question", "Equation", "Answer",
    "Type", "ID"}, as in the original; a body without a full stop gets one.

    `path` is a folder with train.jsonl and test.jsonl; or a pattern with {split}; or one file (.jsonl, or the
    original's SVAMP.json), whose split is the one in its name, such as test.jsonl. A file without a split in its name
    is divided by a hash of the prompt: the fraction `test` is held out. Without `path` the data comes from the Hugging
    Face Hub, with 700 for training and 300 for test. With `validation` above 0, that fraction of the rest becomes
    validation.

    Raises LmgymError with file and line for data that cannot be read.

    Example:
        >>> load_task("svamp", "test", path="SVAMP.json")[0].references
        ('290 / 2 = 145\\n#### 145',)
    """
    part = split_to_read("svamp", split, validation)
    if not 0 <= test < 1:
        raise LmgymError(f"task.test must be a share, at least 0 and below 1, not {test}")
    # Load the split's rows, or all rows if one file holds all splits.
    file = Path(path).expanduser() if path is not None else None
    whole = file is not None and file.is_file() and split_named(file) is None
    if whole and split == "test" and not test:
        raise MissingSplit("task 'svamp' has no split 'test': set task.test above 0 to hold some of the file out")
    rows = load_rows("svamp", "train" if whole else part, path, hub_id)
    examples = list(fitting(rows, lambda _, row: _of_svamp(row)))
    # Keep the examples whose hashes belong to the split. With separate files, test is all of its file (1.0) and nothing
    # of train's (0.0).
    test_end = test if whole else float(split == "test")

    def part_of(example: Example) -> str:
        fraction = hash_fraction(str(example.prompt))
        if fraction < test_end:
            return "test"
        return "validation" if (fraction - test_end) < validation * (1 - test_end) else "train"

    return [example for example in examples if part_of(example) == split]


def _of_svamp(row: Row) -> Example:
    where, values = row
    body, question = (text_of(row, [name]).strip() for name in ("Body", "Question"))
    answer = _number(column(values, "Answer", where), where)
    equation = re.sub(r"(?<=[0-9])\.0+(?![0-9])", "", text_of(row, ["Equation"])).strip()
    if equation.startswith("(") and equation.endswith(")"):
        inside = equation[1:-1].strip()
        equation = inside if _balanced(inside) else equation
    return Example(
        id=f"svamp/{text_of(row, ['ID'])}",
        prompt=f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {question}",
        references=(f"{equation} = {answer}\n#### {answer}",),
        meta={"answer": answer, "equation": equation, "type": text_of(row, ["Type"])},
    )


def _balanced(text: str) -> bool:
    """True if the brackets balance: for "( 4 - 2 ) + 3", but not for "4 - 2 ) * ( 3 - 1"."""
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def _number(value: object, where: str) -> str:
    """A number as text: 145.0, 145 and "145" give "145"."""
    try:
        is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
        if not is_number or not NUMBER.fullmatch(text := str(value).strip()):
            raise ValueError
        number = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise LmgymError(f"{where}: column 'Answer' must hold a number, got {value!r}") from error
    return str(number) if number.denominator == 1 else text
