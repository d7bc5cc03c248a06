r"""`math_equal`: is the final answer mathematically equal to the reference's? \frac12 equals 0.5, and x+1 equals 1+x.

Easy cases are decided here: equal texts, equal numbers, different whole numbers. All others go to the math-verify
library, which reads LaTeX into a computer algebra system. On a model's text that may take forever, so it runs in
separate processes with a time limit (processes/pool.py).
"""

import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.processes.pool import Failure, ProcessPool, shared
from lmgym.rewards.maths.final_answer import (
    ANNOUNCEMENT,
    ANNOUNCEMENTS,
    LONGEST,
    SPECIAL_TOKEN,
    WORKED,
    extract_answer,
    normalise_number,
    reference_answer,
)
from lmgym.text.latex import depth, has_box, last_boxed, spelling, tidied
from lmgym.types import Example

Unreadable = Literal["refuse", "compare"]
DEEPEST = 30  # nested brackets; deeper ones would overflow the parser's stack
MEMORY = 2.0  # GiB that a worker may take
PATIENCE = 10  # a reference may take so many times longer to read: it comes from the data set, not from a model
WHOLE = re.compile(r"-?[0-9]+")
MATHS = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![0-9])|\\\((?P<round>.+?)\\\)"
)
DECORATION = " \t\r\n*_`\"':=~\u2248"

_readable: set[str] = set()  # references that math-verify has read in this process, so that each is checked once


@register("reward", "math_equal")
def math_equal(
    texts: list[str],
    examples: list[Example],
    *,
    strict: bool = False,
    unreadable: Unreadable = "refuse",
    seconds: float = 5.0,
    workers: int | None = None,
) -> list[float]:
    r"""1 if the text's final answer is mathematically equal to the reference's answer, else 0.

    The text's answer is the content of its last \boxed{} or \fbox{}; if that box is not closed, there is no answer.
    Without a box it is the announced answer ("#### 18", "The answer is $\frac12$"). Without an announcement, and unless
    `strict`, it is the last formula or number of the text, or the whole text if that is one bare line. The reference's
    answer is the example's meta["answer"] if it has one, else it is found in the reference.

    Equal are: numbers of equal value (decimals to six places; 50\% equals 0.5 and also 50); expressions that simplify
    to the same; equal sets, intervals and matrices; texts that differ only in white space. Units and currencies are
    ignored. An answer of more than 1,000 characters or 30 nested brackets is wrong.

    A comparison may take `seconds` of CPU time, in one of `workers` processes (default: one per core, at most 8). If it
    takes longer, or crashes, the answer counts as wrong, with a warning. The values do not depend on the order of the
    answers, except for answers close to the time limit.

    Raises LmgymError for an example without a reference, and for a reference that math-verify cannot read (with
    `unreadable: compare` such a reference is compared as text). Needs the extra lmgym[maths].

    Example:
        >>> math_equal([r"so $\boxed{0.5}$"], [Example("a/0", "?", references=(r"\boxed{\frac12}",))])
        [1.0]
    """
    # 1. All pairs (candidate answer of the text, right answer) of each example.
    right_answers = [_right_answers(example) for example in examples]
    if unreadable == "refuse":
        check_references(examples, seconds=seconds, workers=workers)
    candidates = [[tidied(one) for one in _candidates(text, strict)] for text in texts]
    pairs = [
        [(answer, right) for answer in own for right in valid]
        for own, valid in zip(candidates, right_answers, strict=True)
    ]
    # 2. The workers compare each distinct pair that is no easy case.
    hard = list(dict.fromkeys(pair for own in pairs for pair in own if _easily_equal(*pair) is None))
    compared: dict[tuple[str, str], bool] = {}
    if hard:
        values = _workers(workers).map([["compare", *pair] for pair in hard], seconds)
        compared = {pair: value is True for pair, value in zip(hard, values, strict=True)}
        _warn(values, seconds)
    # 3. A text is right if one of its pairs is equal.
    return [float(any(compared.get(pair, _easily_equal(*pair)) for pair in own)) for own in pairs]


def check_references(
    examples: Sequence[Example],
    *,
    strict: bool = False,
    unreadable: Unreadable = "refuse",
    seconds: float = 5.0,
    workers: int | None = None,
) -> None:
    """Raise LmgymError for the first example whose reference is missing or cannot be read; takes the arguments of
    `math_equal`. Each reference is read only once per process."""
    right_answers = [(right, example) for example in examples for right in _right_answers(example)]
    if unreadable == "compare":
        return
    # Plain numbers need no reading by math-verify.
    unread = list(dict.fromkeys(r for r, _ in right_answers if r not in _readable and normalise_number(r) is None))
    read: dict[str, Any] = {}
    if unread:
        values = _workers(workers).map([["read", right] for right in unread], PATIENCE * seconds)
        read = dict(zip(unread, values, strict=True))
        _readable.update(right for right, value in read.items() if value is True)
    for right, example in right_answers:
        if right in read and read[right] is not True:
            why = f" ({read[right].message})" if isinstance(read[right], Failure) else ""
            raise LmgymError(
                f"reward 'math_equal': math-verify cannot read the reference answer {right[:200]!r} of example "
                f"'{example.id}'{why}; mend it, leave the example out, or set rewards.math_equal.unreadable to compare"
            )


math_equal.limits_itself = True  # type: ignore[attr-defined]  # no alarm is needed, see base.call_reward
math_equal.check = check_references  # type: ignore[attr-defined]  # see base.check_examples


def read_or_compare(request: list[str]) -> bool:
    """Runs in a worker. ["read", latex]: can math-verify read it? ["compare", answer, right]: are the two equal?"""
    kind, *latex = request
    if kind == "read":
        return bool(_parsed(latex[0]))
    from math_verify import verify

    answer, right = latex
    return bool(verify(list(_parsed(right)), list(_parsed(answer)), timeout_seconds=0))


def _prepare() -> None:
    """Runs once in a worker's supervisor: load the library, silence it, and let it build its tables."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    read_or_compare(["compare", r"\frac{1}{2}", "x+1"])


read_or_compare.prepare = _prepare  # type: ignore[attr-defined]


@lru_cache(maxsize=1_000)
def _parsed(latex: str) -> tuple[Any, ...]:
    """The expressions that math-verify reads in a text; empty if it finds no mathematics.

    Its other parser, for plain arithmetic, is not used: it would evaluate model text as Python.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # First with units removed. If that fails, with units kept: a "unit" may be a variable, as in \sin^2 t or a + b + c.
    for units in (True, False):
        form = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all")
        # In a box the whole text is read or nothing; without one, math-verify would accept a readable part of it.
        reader = LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=form)
        expressions = parse(rf"\boxed{{{latex}}}", [reader], fallback_mode="no_fallback", parsing_timeout=0)
        if expressions:
            return tuple(expressions)
    return ()


def _right_answers(example: Example) -> list[str]:
    """The right answers of an example: meta["answer"], else one per reference."""
    given = example.meta.get("answer")
    answers = [str(given)] if given is not None else [_reference(reference) for reference in example.references]
    answers = [tidied(answer) for answer in answers]
    if not answers or not all(answers):
        what = "is empty" if answers or example.references else "is missing"
        raise LmgymError(f"reward 'math_equal' needs a reference, and that of example '{example.id}' {what}")
    return answers


def _reference(reference: str) -> str:
    """The answer in a reference: in a box, else announced, else as `final_answer` finds it."""
    if has_box(reference):
        return last_boxed(reference) or ""
    bare = "\\" in reference and "\n" not in reference.strip()
    return next(_announced(reference), reference if bare else reference_answer(reference))


def _candidates(text: str, strict: bool) -> list[str]:
    """The candidates for the text's final answer; several only if no answer is announced."""
    text = SPECIAL_TOKEN.sub(" ", text)
    # 1. The last box; an unclosed one means that there is no answer.
    if has_box(text):
        box = last_boxed(text)
        return _bounded([box] if box is not None else [])
    # 2. The last announcement.
    announced = next(_announced(text), None)
    if announced is not None:
        return _bounded([announced])
    if strict:
        return []
    # 3. The whole text, if it is a bare line, and the last formula or number.
    bare = text.strip() if len(text) <= LONGEST and not WORKED.search(text.strip()) else ""
    if "\\" in bare:
        return _bounded([bare])
    formulas = [match[0] for match in MATHS.finditer(text[-LONGEST:])]
    last = formulas[-1] if formulas else extract_answer(text)
    return _bounded([one for one in (bare, last) if one])


def _announced(text: str) -> Iterator[str]:
    """The answer on the line after each announcement, the last one first: its first formula, else the answer in it."""
    ends = [match.end() for match in ANNOUNCEMENT.finditer(text)]
    for end in ends[: -ANNOUNCEMENTS - 1 : -1]:
        line = text[end : end + 2 * LONGEST].lstrip(DECORATION).split("\n")[0]
        formula = MATHS.search(line)
        if formula:
            yield formula[0]
        elif "\\" in line:
            yield line
        elif line.strip():
            yield extract_answer("#### " + line) or line


def _bounded(answers: list[str]) -> list[str]:
    """The answers that are neither empty nor too long nor too deeply nested."""
    return [answer for answer in answers if answer.strip() and len(answer) <= LONGEST and depth(answer) <= DEEPEST]


@lru_cache(maxsize=10_000)
def _easily_equal(answer: str, right: str) -> bool | None:
    """True or False if the answers can be compared without algebra, else None."""
    if spelling(answer) == spelling(right):
        return True
    first, second = normalise_number(answer), normalise_number(right)
    if first is not None and first == second:
        return True
    return False if WHOLE.fullmatch(answer) and WHOLE.fullmatch(right) else None


def _workers(count: int | None) -> ProcessPool:
    if importlib.util.find_spec("math_verify") is None:
        raise LmgymError("reward 'math_equal' needs the library math-verify: pip install 'lmgym[maths]'")
    return shared("lmgym.rewards.maths.math_equal:read_or_compare", count, MEMORY)


def _warn(values: Sequence[Any], seconds: float) -> None:
    failures = [value for value in values if isinstance(value, Failure)]
    late = sum(failure.kind == "time" for failure in failures)
    if failures:
        others = [failure.message for failure in failures if failure.kind != "time"]
        rest = f", {len(others)} failed (the first: {others[0]})" if others else ""
        warnings.warn(
            f"reward 'math_equal': of {len(values)} comparisons {late} took longer than {seconds:g} s{rest}; they "
            "count as wrong",
            stacklevel=3,
        )
