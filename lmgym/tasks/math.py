"""MATH, competition problems (Hendrycks et al. 2021, arXiv 2103.03874): 7,500 to train on, 5,000 to test on."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import MissingSplit, check_split, hash_fraction
from lmgym.tasks.sources import Row, load_rows, text_of
from lmgym.text.latex import last_boxed
from lmgym.types import Example

SUBJECTS = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)
LEVELS = (1, 2, 3, 4, 5)
UNBRACED = re.compile(r"\\(?:boxed|fbox)\s+([^\s${}][^${}]*)")  # \boxed 5$


@register("task", "math")
def math(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "DigitalLearningGmbH/MATH-lighteval",
    validation: float = 0.0,
    levels: Sequence[int] | None = None,
    subjects: Sequence[str] | None = None,
    skip_unanswered: bool = False,
) -> list[Example]:
    r"""The problem as prompt, the worked solution ("... $\boxed{\frac12}$") as reference.

    `meta` has answer (what stands in the solution's last box, or in the row's column `answer`), level (1 to 5, None
    where the data has "?") and subject. Rows are {"problem", "solution", "level", "type"}, as in the original, or as in
    MATH-500 with "answer" and "subject". A row with an answer and no solution has the answer in a box as reference.

    `path` is a folder with train.jsonl and test.jsonl, or with the original's folders train and test of one .json a
    problem; or one file, which serves the split that its name holds (math500_test.jsonl: test) and otherwise train; or
    a pattern with {split}. Without `path` the data comes from the Hugging Face Hub.

    `levels` and `subjects` keep only those. With `validation` above 0 so much of train becomes that split, by a hash of
    the problem. A problem of train that is also in test (there is one, but for its white space) is left out of train.

    Raises LmgymError with file and line for what cannot be read, and for a row with a blank answer, unless
    `skip_unanswered` leaves such rows out.

    Example:
        >>> load_task("math", "train", path="data/math", levels=[4, 5], system_prompt="Put your answer in \\boxed{}.")
    """
    check_split("math", split)
    _check(validation, levels, subjects)
    if split == "validation" and not validation:
        raise MissingSplit("task 'math' has no split 'validation': set task.validation above 0 to take it from train")
    part = "test" if split == "test" else "train"
    examples = _part(part, path, hub_id, skip_unanswered)
    if split != "test":
        tested = _tested(path, hub_id, skip_unanswered)
        examples = [example for example in examples if _words(example) not in tested]
        held_out = [hash_fraction(_words(example)) < validation for example in examples]
        examples = [e for e, out in zip(examples, held_out, strict=True) if out == (split == "validation")]
    return [
        example
        for example in examples
        if (levels is None or example.meta["level"] in levels)
        and (subjects is None or example.meta["subject"] in subjects)
    ]


def _check(validation: float, levels: Sequence[int] | None, subjects: Sequence[str] | None) -> None:
    if not 0 <= validation < 1:
        raise LmgymError(f"task.validation must be a share of train, at least 0 and below 1, not {validation}")
    for level in levels or ():
        if level not in LEVELS:
            raise LmgymError(f"task.levels names {level}; MATH has the levels 1 to 5")
    for subject in subjects or ():
        if subject not in SUBJECTS:
            raise LmgymError(f"task.subjects names '{subject}', which MATH has not; {suggest(subject, SUBJECTS)}")


def _part(part: str, path: str | Path | None, hub_id: str, skip_unanswered: bool) -> list[Example]:
    found = load_rows("math", part, path, hub_id)
    examples = [_example(row, f"math/{part}/{index}", skip_unanswered) for index, row in enumerate(found)]
    return [example for example in examples if example is not None]


def _tested(path: str | Path | None, hub_id: str, skip_unanswered: bool) -> set[str]:
    """The problems of test, where there is one."""
    try:
        return {_words(example) for example in _part("test", path, hub_id, skip_unanswered)}
    except MissingSplit:
        return set()


def _words(example: Example) -> str:
    return " ".join(str(example.prompt).split())


def _example(row: Row, id: str, skip_unanswered: bool) -> Example | None:
    where, values = row
    problem = text_of(row, ["problem"])
    answer = values.get("answer")
    if "solution" in values:
        solution = text_of(row, ["solution"])
        answer = _boxed(solution, where) if answer is None else answer
        references = (solution,)
    elif "answer" not in values:
        raise LmgymError(f"{where}: there is neither a column 'solution' nor 'answer'; {suggest('solution', values)}")
    else:
        references = (rf"$\boxed{{{answer}}}$",)
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or not str(answer).strip():
        if skip_unanswered and isinstance(answer, str):
            return None
        raise LmgymError(
            f"{where}: the answer must be a text, got {answer!r}; task.skip_unanswered leaves rows with a blank one out"
        )
    subject = text_of(row, ["subject", "type"])
    return Example(
        id=id,
        prompt=problem,
        references=references,
        meta={"answer": str(answer).strip(), "level": _level(values.get("level"), where), "subject": subject},
    )


def _boxed(solution: str, where: str) -> str:
    answer = last_boxed(solution)
    unbraced = UNBRACED.findall(solution)
    if answer is None and unbraced:
        answer = unbraced[-1]
    if answer is None:
        raise LmgymError(rf"{where}: the solution has no answer in a \boxed{{}}")
    return answer


def _level(value: Any, where: str) -> int | None:
    """5 of 5 or "Level 5"; None of "Level ?"."""
    word = str(value).removeprefix("Level ").strip()
    if word == "?":
        return None
    if word not in map(str, LEVELS):
        raise LmgymError(f"{where}: column 'level' must hold a level from 1 to 5, such as 'Level 3', got {value!r}")
    return int(word)
