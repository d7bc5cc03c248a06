r"""`math_equal`: is the final answer mathematically equal to the reference's? \frac12 equals 0.5, and x+1 equals 1+x.

Easy cases are decided here: equal texts, equal numbers, different whole numbers. All others go to the math-verify
library, which reads LaTeX into a computer algebra system. On a model's text that may take forever, so it runs in
separate processes with a time limit (processes/pool.py)."""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from lmgym.core.errors import LmgymError, warn
from lmgym.core.registry import register
from lmgym.processes.pool import Failure, ProcessPool, shared
from lmgym.rewards.maths.answers import candidates, reference_of
from lmgym.rewards.maths.comparison import easily_equal, equal, parsed
from lmgym.rewards.maths.final_answer import ANNOUNCEMENT, LONGEST, is_worked, normalise_number
from lmgym.text.latex import has_box, tidied
from lmgym.types import Example

Unreadable = Literal["refuse", "compare"]
MEMORY = 2.0  # GiB that a worker may take
PATIENCE = 10  # a reference may take so many times longer to read: it comes from the data set, not from a model

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

    The text's answer is the content of its last \boxed{} or \fbox{}, or of several that "and", "or" or a comma link
    ("\boxed{2} and \boxed{3}"); if the last box is not closed, there is no answer. Without a box it is the announced
    answer ("#### 18", "The answer is $\frac12$", "Final Answer: The largest $n$ is 34"). Without an announcement, and
    unless `strict`, it is the last formula or number of the text, or the whole text if that is one bare line. The
    reference's answer is the example's meta["answer"] if it has one, else it is found in the reference. It is found in
    meta["answer"] too, if that announces it, or is a worked solution that became the reference.

    Equal are: numbers of equal value (decimals to six places; 50\% equals 0.5 and also 50); expressions that simplify
    to the same; equal tuples, intervals and matrices; sets and lists with equal parts in any order; texts that differ
    only in white space. Units and currencies are ignored. A comma separates parts or thousands, never decimals. An
    answer of more than 1,000 characters or 30 nested brackets is wrong.

    A comparison may take `seconds` of CPU time, in one of `workers` processes (default: one per core, at most 8). If it
    takes longer, or crashes, the answer counts as wrong, with a warning. The values do not depend on the order of the
    answers, except for answers close to the time limit.

    Raises LmgymError for an example without a reference, for a reference's answer of more than 1,000 characters, and
    for one that math-verify cannot read (with `unreadable: compare` that is compared as text). Needs the extra
    lmgym[maths].

    Example: math_equal([r"so $\boxed{0.5}$"], [Example("a/0", "?", references=(r"\boxed{\frac12}",))]) -> [1.0]"""
    # 1. All pairs (candidate answer of the text, right answer) of each example.
    right_answers = [_right_answers(example) for example in examples]
    if unreadable == "refuse":
        check_references(examples, seconds=seconds, workers=workers)
    answers = [_answers(text, valid, strict) for text, valid in zip(texts, right_answers, strict=True)]
    pairs = [
        [(answer, right) for answer in own for right in valid]
        for own, valid in zip(answers, right_answers, strict=True)
    ]
    # 2. The workers compare each distinct pair that is no easy case.
    hard = list(dict.fromkeys(pair for own in pairs for pair in own if easily_equal(*pair) is None))
    compared: dict[tuple[str, str], bool] = {}
    if hard:
        values = _workers(workers).map([["compare", *pair] for pair in hard], seconds)
        compared = {pair: value is True for pair, value in zip(hard, values, strict=True)}
        _warn(values, seconds)
    # 3. A text is right if one of its pairs is equal.
    return [float(any(compared.get(pair, easily_equal(*pair)) for pair in own)) for own in pairs]


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


def vote_of(text: str) -> str | None:
    r"""What an answer votes for: its final answer, numbers in one form, other LaTeX tidied; None if it has none. Two
    forms of one expression, such as x+1 and 1+x, are two votes.

    Example: vote_of(r"so $\boxed{0.5}$"), vote_of(r"\boxed{\frac12}") -> ('1/2', '1/2')"""
    found = candidates(text, strict=False)
    if not found:
        return None
    latex = tidied(found[0])
    number = normalise_number(latex)
    return "".join(latex.split()) if number is None else str(number)


math_equal.vote = vote_of  # type: ignore[attr-defined]  # for maj@k, see rollouts/evaluate.py


def read_or_compare(request: list[str]) -> bool:
    """Runs in a worker. ["read", latex]: can math-verify read it? ["compare", answer, right]: are the two equal?"""
    kind, *latex = request
    return equal(*latex) if kind == "compare" else bool(parsed(latex[0]))


def _prepare() -> None:
    """Runs once in a worker's supervisor: load the library, silence it, and let it build its tables."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    read_or_compare(["compare", r"\frac{1}{2}", "x+1"])


read_or_compare.prepare = _prepare  # type: ignore[attr-defined]


def _right_answers(example: Example) -> list[str]:
    """The right answers of an example: that of meta["answer"], else one per reference."""
    known = example.meta.get("answer")
    answers = [_known(str(known), example)] if known is not None else [reference_of(one) for one in example.references]
    for answer in answers:
        if len(answer) > LONGEST:
            raise LmgymError(
                f"reward 'math_equal': the reference answer of example '{example.id}' has {len(answer):,} characters, "
                f"and answers of more than {LONGEST:,} are not read; shorten it, or leave the example out"
            )
    answers = [tidied(answer) for answer in answers]
    if not answers or not all(answers):
        what = "is empty" if answers or example.references else "is missing"
        raise LmgymError(f"reward 'math_equal' needs a reference, and that of example '{example.id}' {what}")
    return answers


def _known(answer: str, example: Example) -> str:
    """The answer in meta["answer"], which may be a whole solution: announced, or the column that became a reference."""
    has_sentences = "\n" in answer.strip() or answer.strip()[-1:] in (".", "!", "?")  # unlike "June 20"
    worked = answer in example.references and has_sentences and is_worked(answer)
    return reference_of(answer) if worked or has_box(answer) or ANNOUNCEMENT.search(answer) else answer


def _answers(text: str, right: Sequence[str], strict: bool) -> list[str]:
    """The candidates for the answer in a text; the text itself if it repeats a right answer word for word."""
    whole = tidied(text) if not strict and len(text) <= LONGEST else ""
    return [whole] if whole in right else [tidied(one) for one in candidates(text, strict)]


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
        warn(
            f"reward 'math_equal': of {len(values)} comparisons {late} took longer than {seconds:g} s{rest}; they "
            "count as wrong",
            stacklevel=3,
        )
