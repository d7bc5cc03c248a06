"""`math`: MATH, competition problems (Hendrycks et al. 2021, arXiv 2103.03874): 7,500 train, 5,000 test."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import MissingSplit, hash_fraction
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import text_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import split_to_read
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
# A formula or a drawing: no sentence ends inside, except with its last character.
FORMULA = re.compile(
    r"\\begin\{(\w+\*?)\}.{0,5000}?\\end\{\1\}|\[asy\].{0,5000}?\[/asy\]|\\\[.{0,5000}?\\\]|\\\(.{0,5000}?\\\)"
    r"|\$\$.{0,5000}?\$\$|\$(?:\\.|[^$\\]){0,5000}+\$",
    re.DOTALL,
)
FULL_STOP = re.compile(r"[.!?][\s}]*(?:\$\$?|\\[\])]|\\end\{\w+\*?\})$")  # the end of a formula that ends a sentence
HIDDEN = "\ue000"  # in place of each character of a formula
ABBREVIATION = re.compile(r"\b(?:i\.e|e\.g|cf|vs|resp|approx|Prof|Mrs?|Ms|Dr|St|Eq|Fig|No)\.$")
SENTENCE_END = re.compile(
    rf"[.!?][)\"'\]]*(?=\s+[A-Z({HIDDEN}])|(?<={HIDDEN})\.(?=[A-Z])|\s*\n\s*\n"  # after a display, without a space
)
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
    split_sentences: bool = False,
) -> list[Example]:
    r"""The prompt is the problem, the reference the worked solution ("... $\boxed{\frac12}$").

    `meta` has answer (the content of the solution's last box, or the row's column `answer`), level (1 to 5; None if the
    data has "?") and subject. Rows are {"problem", "solution", "level", "type"} as in the original, or with "answer"
    and "subject" as in MATH-500. If a row has an answer but no solution, the reference is the answer in a box.

    `path` is a folder with train.jsonl and test.jsonl; or the original's folder, where train and test hold one .json
    per problem; or one file, whose split is the one in its name (math500_test.jsonl: test), else train; or a pattern
    with {split}. Without `path` the data comes from the Hugging Face Hub.

    `split_sentences` writes each sentence of the references on a line of its own, for the environment `stepwise`, whose
    actions are lines: a solution of MATH is a paragraph (`sentence_lines`).

    `levels` and `subjects` select problems. With `validation` above 0, that fraction of train becomes validation, by a
    hash of the problem. A problem of train that is also in test (one is, with other white space) is removed from train.

    Raises LmgymError with file and line for data that cannot be read, and for a row with a blank answer; with
    `skip_unanswered` such rows are left out.

    Example:
        >>> load_task("math", "train", path="data/math", levels=[4, 5], system_prompt="Put your answer in \\boxed{}.")
    """
    part = split_to_read("math", split, validation)
    for level in levels or ():
        if level not in LEVELS:
            raise LmgymError(f"task.levels names {level}; MATH has the levels 1 to 5")
    for subject in subjects or ():
        if subject not in SUBJECTS:
            raise LmgymError(f"task.subjects names '{subject}', which MATH has not; {suggest(subject, SUBJECTS)}")
    examples = _part(part, path, hub_id, skip_unanswered)
    if split != "test":
        # Remove the problems of test, then divide the rest into train and validation by a hash.
        test_problems = _test_problems(path, hub_id, skip_unanswered)
        examples = [example for example in examples if _words(example) not in test_problems]
        held_out = [hash_fraction(_words(example)) < validation for example in examples]
        examples = [e for e, out in zip(examples, held_out, strict=True) if out == (split == "validation")]
    if split_sentences:
        examples = [replace(e, references=tuple(map(sentence_lines, e.references))) for e in examples]
    return [
        example
        for example in examples
        if (levels is None or example.meta["level"] in levels)
        and (subjects is None or example.meta["subject"] in subjects)
    ]


def sentence_lines(solution: str) -> str:
    r"""A solution with each sentence on one line. A formula is never cut, and its line breaks become spaces; a sentence
    may end with a formula's full stop ("$x=2.$"). An empty line ends a sentence, too.

    Example:
        >>> sentence_lines(r"We have $x=1.5$, i.e. $2x=3.$ Thus \[x\n= \boxed{1.5}.\]").splitlines()
        ['We have $x=1.5$, i.e. $2x=3.$', 'Thus \\[x = \\boxed{1.5}.\\]']
    """
    shown = FORMULA.sub(lambda m: HIDDEN * (len(m[0]) - 1) + ("." if FULL_STOP.search(m[0]) else HIDDEN), solution)
    ends = [end.end() for end in SENTENCE_END.finditer(shown) if not ABBREVIATION.search(shown[: end.end()][-10:])]
    edges = [0, *ends, len(solution)]
    sentences = (" ".join(solution[begin:end].split()) for begin, end in pairwise(edges))
    return "\n".join(sentence for sentence in sentences if sentence)


def _part(part: str, path: str | Path | None, hub_id: str, skip_unanswered: bool) -> list[Example]:
    rows = load_rows("math", part, path, hub_id)
    return list(fitting(rows, lambda index, row: _example(row, f"math/{part}/{index}", skip_unanswered)))


def _test_problems(path: str | Path | None, hub_id: str, skip_unanswered: bool) -> set[str]:
    """The problems of test; none if the data has no such split."""
    try:
        return {_words(example) for example in _part("test", path, hub_id, skip_unanswered)}
    except MissingSplit:
        return set()


def _words(example: Example) -> str:
    """The problem with single spaces, to recognise problems that differ in white space only."""
    return " ".join(str(example.prompt).split())


def _example(row: Row, id: str, skip_unanswered: bool) -> Example | None:
    """The example of a row; None if it has a blank answer and such rows are skipped."""
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
    """The answer in the solution's last box, which may lack its braces."""
    if (answer := last_boxed(solution)) is not None:
        return answer
    unbraced: list[str] = UNBRACED.findall(solution)
    if not unbraced:
        raise LmgymError(rf"{where}: the solution has no answer in a \boxed{{}}")
    return unbraced[-1]


def _level(value: Any, where: str) -> int | None:
    """The level as a number: 5 for 5 or "Level 5", None for "Level ?"."""
    word = str(value).removeprefix("Level ").strip()
    if word == "?":
        return None
    if word not in map(str, LEVELS):
        raise LmgymError(f"{where}: column 'level' must hold a level from 1 to 5, such as 'Level 3', got {value!r}")
    return int(word)
