r"""Which part of a text is its answer: the last box, the announced answer, or the last formula or number.

No function raises, or takes more than linear time: formulas are looked for in 2,000 characters at most."""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lmgym.rewards.maths.final_answer import (
    ANNOUNCEMENT,
    ANNOUNCEMENTS,
    LIST,
    LONGEST,
    NUMBER,
    SENTENCE_END,
    SPECIAL_TOKEN,
    WORKED,
    extract_answer,
    normalise_number,
    reference_answer,
)
from lmgym.text.latex import depth, has_box, last_answer, last_boxed, tidied

DEEPEST = 30  # nested brackets; deeper ones would overflow the parser's stack
DECORATION = " \t\r\n*_`\"':=~\u2248"
FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\$(?P<tight>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![0-9])|\$(?P<spaced>[^$\n]+)\$(?![0-9])"
    r"|\\\((?P<round>[^\n]+?)\\\)|\\\[(?P<square>.+?)\\\]",
    re.DOTALL,
)
COMMAND = re.compile(
    r"\\(?:text|textbf|mathrm|mbox)\s?\{[^{}]*\}|\\(?:begin|end)\s?\{[a-z]+\}(?:\{[clr|]+\})?|\\[A-Za-z]+"
)
WORD = re.compile(r"[A-Za-z]{2,}")
AND = re.compile(r"\s*,?\s*(?P<word>\b(?:and|or)\b)\s*|\s*[,;]\s*")  # between the formulas of one answer
IS = re.compile(r"\b(?:is|are|equals?|be) (?:(?:then|thus|therefore|exactly|equal to) )?+")
VERBS = 10  # how many of them are tried, from the last one back
HEDGE = re.compile(r"\bor\s{1,3}$")
PERCENT = re.compile(r"\s?(?:\\?%|percent\b|percentage\b|pct\b)")


class Span(NamedTuple):
    """A part of a text, and what it says: the formulas in it without their dollars."""

    start: int
    end: int
    content: str


def candidates(text: str, strict: bool) -> list[str]:
    """The candidates for the text's final answer; several if no answer is announced, or linked boxes may be one."""
    text = SPECIAL_TOKEN.sub(" ", text)
    # 1. The last boxes, as one answer in several parts or the last one alone; an unclosed one means: no answer.
    if has_box(text):
        return _bounded([box for box in dict.fromkeys([last_answer(text), last_boxed(text)]) if box is not None])
    # 2. The last announcement.
    announced = next(_announced(text), None)
    if announced is not None:
        return _bounded([announced])
    return [] if strict else _bounded(_unannounced(text))


def reference_of(reference: str) -> str:
    """The answer in a reference: in boxes, else announced, else its formulas, else as `final_answer` finds it."""
    if has_box(reference):
        return last_answer(reference) or ""
    announced = next(_announced(reference), None)
    if announced is not None:
        return announced
    reference = reference.strip()
    run = _run_from(reference, 0) if len(reference) <= LONGEST else None
    if run is not None and run.end == len(reference):
        return run.content
    factorial = reference.endswith("!") and not WORKED.search(reference)
    whole = "\n" not in reference and ("\\" in reference or factorial or LIST.fullmatch(reference))
    return reference if whole else reference_answer(reference)


def _announced(text: str) -> Iterator[str]:
    """The answer after each announcement, the last one first."""
    ends = [match.end() for match in ANNOUNCEMENT.finditer(text)]
    for end in ends[: -ANNOUNCEMENTS - 1 : -1]:
        rest = text[end : end + 2 * LONGEST].lstrip(DECORATION)
        run = _run_from(rest, 0)
        line = rest.split("\n")[0]
        if run is not None:
            yield run.content
        elif line.strip():
            yield _in_line(line)


def _in_line(line: str) -> str:
    """The answer in a line that does not begin with a formula."""
    # 1. Several numbers: "2, 3 and 5".
    sentence = SENTENCE_END.split(line)[0]
    if LIST.fullmatch(sentence):
        return sentence
    # 2. "The largest $n$ is 34": what stands after the last "is", if the line has formulas before it.
    first = next(_formulas(sentence), None)
    for verb in [] if first is None else [*IS.finditer(sentence, first.end)][: -VERBS - 1 : -1]:
        rest = sentence[verb.end() :].lstrip(DECORATION)
        run = _run_from(rest, 0)
        if run is not None or NUMBER.match(rest):
            return run.content if run is not None else extract_answer("#### " + rest) or rest
    # 3. The first formula; else the number or text that the line begins with.
    first = next(_formulas(line), None)
    if first is not None:
        run = _run_from(line, first.start)
        return run.content if run is not None else first.content
    return line if "\\" in line else extract_answer("#### " + line) or line


def _unannounced(text: str) -> list[str]:
    """The whole text, if it is a bare line, and its last formula or number, whichever comes later."""
    bare = text.strip() if len(text) <= LONGEST and not WORKED.search(text.strip()) else ""
    if bare and ("\\" in bare or normalise_number(tidied(bare)) is not None):
        return [bare]
    tail = text[-LONGEST:]
    run = next(iter(deque(_runs(tail), maxlen=1)), None)  # the last one
    # A number inside a word (A2B) is none, and after "or" it is only one of several.
    numbers = [
        match
        for match in NUMBER.finditer(tail, run.end if run else 0)
        if not (tail[: match.start()][-1:].isalpha() and tail[match.end() :][:1].isalpha())
    ]
    if not numbers:
        return [one for one in (bare, run.content if run else "") if one]
    last = numbers[-1]
    if HEDGE.search(tail[max(0, last.start() - 6) : last.start()]):
        return [bare] if bare else []
    number = extract_answer(last[0]) or ""
    return [one for one in (bare, number + (r"\%" if PERCENT.match(tail, last.end()) else "")) if one]


def _formulas(text: str) -> Iterator[Span]:
    """The formulas of a text. $x$ has nothing but the formula between its dollars; $ x $ counts only without words,
    since $5 and $ 6 are prices."""
    position = 0
    while match := FORMULA.search(text, position):
        if match["spaced"] and WORD.search(COMMAND.sub(" ", match["spaced"])):
            position = match.start() + 1
            continue
        content = next(group for group in match.groups() if group is not None)
        yield Span(match.start(), match.end(), content)
        position = match.end()


def _run_from(text: str, start: int) -> Span | None:
    """The formula at a place, with those that "and" or "or" links to it: "$2$, $3$ and $5$" says "2, 3, 5"."""
    if text[start : start + 1] not in ("$", "\\"):
        return None
    first = next(_runs(text[start:]), None)
    if first is None or first.start != 0:
        return None
    return Span(start, start + first.end, first.content)


def _runs(text: str) -> Iterator[Span]:
    """Formulas that are linked; commas link only where an "and" or "or" follows ("if $n=2$, $m=3$" are two)."""
    linked: list[Span] = []
    words = False
    for formula in [*_formulas(text), None]:
        between = AND.fullmatch(text, linked[-1].end, formula.start) if linked and formula else None
        if linked and (formula is None or between is None):
            if words:
                yield Span(linked[0].start, linked[-1].end, ", ".join(one.content for one in linked))
            else:
                yield from linked
            linked, words = [], False
        if formula is not None:
            linked.append(formula)
            words = words or bool(between and between["word"])


def _bounded(answers: list[str]) -> list[str]:
    """The answers that are neither empty nor too long nor too deeply nested."""
    return [answer for answer in answers if answer.strip() and len(answer) <= LONGEST and depth(answer) <= DEEPEST]
