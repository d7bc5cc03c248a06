r"""`math_equal`: is the final answer the reference's, as mathematics? \frac12 is 0.5, and x+1 is 1+x.

What is plainly equal or plainly another whole number is settled here. The rest goes through the math-verify library,
which reads LaTeX into a computer algebra system: on a model's text that may take for ever, so it works in processes of
its own (processes/pool.py).
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
DEEPEST = 30  # brackets in each other; deeper ones would exhaust the parser's stack
MEMORY = 2.0  # GiB that a worker may take
PATIENCE = 10  # times as long for reading a reference, which somebody has looked at
WHOLE = re.compile(r"-?[0-9]+")
MATHS = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![0-9])|\\\((?P<round>.+?)\\\)"
)
DECORATION = " \t\r\n*_`\"':=~\u2248"

_readable: set[str] = set()  # references that have been read in this process


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
    r"""1 if the final answer of the text equals the reference's answer as mathematics, else 0.

    The answer of a text is what stands in its last \boxed{} or \fbox{}; a box that is never closed is no answer.
    Without a box it is what is announced ("#### 18", "The answer is $\frac12$"); without that, unless `strict`, the
    last formula or number of the text, or all of it where it is a bare line. The reference's answer is meta["answer"]
    where the example has it, else that of the reference.

    Equal are numbers of equal value (decimals to six places; 50\% is 0.5 and also 50), expressions that simplify to the
    same, sets, intervals, matrices, and texts that differ in white space only. Units and currencies do not count.
    An answer of more than 1,000 characters or 30 nested brackets is wrong.

    One comparison may take `seconds` of processor time, in one of `workers` processes (one a core, 8 at most); one that
    takes longer, or crashes, counts as wrong, with a warning. The values do not depend on the order of the answers,
    unless one is near that limit.

    Raises LmgymError for an example without a reference, and for one whose reference math-verify cannot read (with
    `unreadable: compare`, that one is compared as text). Needs the extra lmgym[maths].

    Example:
        >>> math_equal([r"so $\boxed{0.5}$"], [Example("a/0", "?", references=(r"\boxed{\frac12}",))])
        [1.0]
    """
    wanted = [_wanted(example) for example in examples]
    if unreadable == "refuse":
        check_references(examples, seconds=seconds, workers=workers)
    answers = [[tidied(one) for one in _answers(text, strict)] for text in texts]
    pairs = [
        [(answer, right) for answer in found for right in valid] for found, valid in zip(answers, wanted, strict=True)
    ]
    asked = list(dict.fromkeys(pair for some in pairs for pair in some if _plainly(*pair) is None))
    known: dict[tuple[str, str], bool] = {}
    if asked:
        values = _workers(workers).map([["compare", *pair] for pair in asked], seconds)
        known = {pair: value is True for pair, value in zip(asked, values, strict=True)}
        _warn(values, seconds)
    return [float(any(known.get(pair, _plainly(*pair)) for pair in some)) for some in pairs]


def check_references(
    examples: Sequence[Example],
    *,
    strict: bool = False,
    unreadable: Unreadable = "refuse",
    seconds: float = 5.0,
    workers: int | None = None,
) -> None:
    """Raise LmgymError for the first example whose reference is missing or cannot be read; takes the arguments of
    `math_equal`. Each reference is read once in a process."""
    wanted = [(right, example) for example in examples for right in _wanted(example)]
    if unreadable == "compare":
        return
    fresh = list(dict.fromkeys(r for r, _ in wanted if r not in _readable and normalise_number(r) is None))
    read: dict[str, Any] = {}
    if fresh:
        values = _workers(workers).map([["read", right] for right in fresh], PATIENCE * seconds)
        read = dict(zip(fresh, values, strict=True))
        _readable.update(right for right, value in read.items() if value is True)
    for right, example in wanted:
        if right in read and read[right] is not True:
            why = f" ({read[right].message})" if isinstance(read[right], Failure) else ""
            raise LmgymError(
                f"reward 'math_equal': math-verify cannot read the reference answer {right[:200]!r} of example "
                f"'{example.id}'{why}; mend it, leave the example out, or set rewards.math_equal.unreadable to compare"
            )


math_equal.limits_itself = True  # type: ignore[attr-defined]  # no alarm is needed, see base.call_reward
math_equal.check = check_references  # type: ignore[attr-defined]  # see base.check_examples


def read_or_compare(request: list[str]) -> bool:
    """In a worker: ["read", latex] says if math-verify can read it, ["compare", answer, right] if the two are equal."""
    kind, *latex = request
    if kind == "read":
        return bool(_parsed(latex[0]))
    from math_verify import verify

    answer, right = latex
    return bool(verify(list(_parsed(right)), list(_parsed(answer)), timeout_seconds=0))


def _prepare() -> None:
    """In a worker's supervisor: load the library, silence it, and let it build its tables."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    read_or_compare(["compare", r"\frac{1}{2}", "x+1"])


read_or_compare.prepare = _prepare  # type: ignore[attr-defined]


@lru_cache(maxsize=1_000)
def _parsed(latex: str) -> tuple[Any, ...]:
    """What math-verify makes of it; nothing where it finds no mathematics.

    Its other way of reading, that of plain arithmetic, is left out: it evaluates Python.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    for units in (True, False):  # what is taken for a unit may have been a variable: \sin^2 t, a + b + c
        form = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all")
        # Without an anchor it would make do with a part of what it cannot read.
        reader = LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=form)
        found = parse(rf"\boxed{{{latex}}}", [reader], fallback_mode="no_fallback", parsing_timeout=0)
        if found:
            return tuple(found)
    return ()


def _wanted(example: Example) -> list[str]:
    """The answers that would be right."""
    given = example.meta.get("answer")
    found = [str(given)] if given is not None else [_reference(reference) for reference in example.references]
    wanted = [tidied(one) for one in found]
    if not wanted or not all(wanted):
        what = "is empty" if wanted or example.references else "is missing"
        raise LmgymError(f"reward 'math_equal' needs a reference, and that of example '{example.id}' {what}")
    return wanted


def _reference(reference: str) -> str:
    """The answer of a reference: in a box, announced, or as `final_answer` finds it."""
    if has_box(reference):
        return last_boxed(reference) or ""
    bare = "\\" in reference and "\n" not in reference.strip()
    return next(_announced(reference), reference if bare else reference_answer(reference))


def _answers(text: str, strict: bool) -> list[str]:
    """What the text may have meant as its final answer; one thing, unless nothing is announced."""
    text = SPECIAL_TOKEN.sub(" ", text)
    if has_box(text):
        box = last_boxed(text)
        return _bounded([box] if box is not None else [])
    announced = next(_announced(text), None)
    if announced is not None:
        return _bounded([announced])
    if strict:
        return []
    bare = text.strip() if len(text) <= LONGEST and not WORKED.search(text.strip()) else ""
    if "\\" in bare:
        return _bounded([bare])
    formulas = [match[0] for match in MATHS.finditer(text[-LONGEST:])]
    last = formulas[-1] if formulas else extract_answer(text)
    return _bounded([one for one in (bare, last) if one])


def _announced(text: str) -> Iterator[str]:
    """What follows each announcement on its line, the last one first: the first formula in it, else its answer."""
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
    return [answer for answer in answers if answer.strip() and len(answer) <= LONGEST and depth(answer) <= DEEPEST]


@lru_cache(maxsize=10_000)
def _plainly(answer: str, right: str) -> bool | None:
    """Whether the two are equal, where that takes no algebra."""
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
