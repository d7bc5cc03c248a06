r"""Are two answers equal? The easy cases by text and exact numbers, the others by the math-verify library.

The answers are in the normal form of `text.latex.tidied`."""

import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from lmgym.rewards.maths.final_answer import normalise_number
from lmgym.text.latex import spelling

PLACES = 6  # decimals that are compared
ROUNDING = 1e-14  # the part of its value by which a decimal of math-verify, a float, is off
RELATIVE = Fraction(1, 1000)  # and the part of its value that a small number may be off
MOST_PARTS = 20  # of an answer that is a list
PERCENT = re.compile(r"(?:\\?%|percent|percentage|pct)\s*[.}]?\s*$")
TEXT = re.compile(r"\\(?:text|textbf|textit|textnormal|mathrm|mathbf|mbox|operatorname)\{([^{}\\]*)\}")
CHOICE = re.compile(r"\(?(?P<letter>[A-J])(?:\)?[.:]|\))\s*(?!.*\b(?:or|and)\b).+")  # "C. x = 42"
WORD = re.compile(r"[A-Za-z]{4,}")
LETTER = re.compile(r"\(?([A-J])\)?")
REVERSED = re.compile(r"(?P<value>[^=<>]+)=\s*(?P<name>[A-Za-z])")  # "2 = x"
LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
APART = re.compile(r"(?<![\^_])[0-9]\s+[0-9]")  # two numbers with only a space between: no product, and no number
UNIT_SPACE = re.compile(r"(?<=[0-9])\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=[0-9])")  # "5 ft 10 in" is "5ft10in"
BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")  # "4210_7"
SCALED = re.compile(r"[0-9][eE][-+]?[0-9]|(?:hundred|thousand|illion)s?\b", re.IGNORECASE)
REPEATING = re.compile(r"(-?[0-9]{0,99})\.([0-9]{0,99})\\overline\{([0-9]{1,99})\}")
ASSIGNMENT = re.compile(r"\s*[A-Za-z]\s*=")
SEPARATOR = re.compile(r"\\text\{\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|;")


@lru_cache(maxsize=10_000)
def easily_equal(answer: str, right: str) -> bool | None:
    """True or False if the answers can be compared without algebra, else None."""
    if spelling(answer) == spelling(right):
        return True
    words = _words(answer), _words(right)
    if words[0] == words[1] or _chosen(*words) or _chosen(*reversed(words)):
        return True
    if all(WORD.fullmatch(one) for one in words):  # math-verify would read a product of letters: listen = silent
        return words[0].casefold() == words[1].casefold()
    if (_is_set(answer) and _in_parentheses(right)) or (_is_set(right) and _in_parentheses(answer)):
        return False
    first, second = _number(answer), _number(right)
    if first is None or second is None:
        return None
    # 50% equals 50 and also 0.5.
    percents = [PERCENT.search(one) is not None for one in (answer, right)]
    scales = [Fraction(1)] if percents[0] == percents[1] else [Fraction(1), Fraction(100)]
    if any(first == second * scale if percents[0] else first * scale == second for scale in scales):
        return True
    # Decimals are equal in their first six places, and off by no more than a thousandth.
    near = abs(first - second) <= RELATIVE * max(abs(first), abs(second))
    return ("." in answer or "." in right) and near and round(first * 10**PLACES) == round(second * 10**PLACES)


def equal(answer: str, right: str) -> bool:
    """Equal by algebra: part by part if both are lists of as many parts, or as a whole. Lists have no order, tuples
    have one, and a list beside a tuple is taken as one. Runs in a worker."""
    pair = (answer, right)
    tuples = [one for one in pair if _in_parentheses(one)]
    ours, theirs = (parts(one[1:-1] if one in tuples else one) for one in pair)
    several = 1 < len(ours) == len(theirs) <= MOST_PARTS
    lists = min(len(ours), len(theirs)) > 1 and max(len(ours), len(theirs)) <= MOST_PARTS
    if len(tuples) == 2:
        same_ends = answer[0] + answer[-1] == right[0] + right[-1]
        return (several and same_ends and _equal_in_order(ours, theirs)) or verified(answer, right)
    if len(tuples) == 1 and all(len(one) > 1 for one in (ours, theirs)):
        return several and tuples[0][0] + tuples[0][-1] == "()" and _equal_in_order(ours, theirs)
    if several and _equal_in_any_order(ours, theirs):
        return True
    # Two lists as a whole would be sets to math-verify, for which 3, 3, 5 is 3, 5; only \pm makes one part two.
    as_sets = any(_is_set(one) or r"\pm" in one or r"\mp" in one for one in pair)
    return (as_sets or not lists) and verified(answer, right)


def parts(latex: str) -> list[str]:
    r"""The parts of an answer that commas, semicolons, "and" or "or" separate outside of brackets.

    Example: parts(r"x=1, (2,3) \text{ and } 1,000") -> ['x=1', '(2,3)', '1,000']"""
    if _is_set(latex):
        latex = latex[2:-2]
    elif (text := TEXT.fullmatch(latex)) or (latex.startswith("{") and _closes_at_end(latex)):
        latex = text[1] if text else latex[1:-1]
    found = []
    for piece in _split(latex, SEPARATOR):
        found += [piece] if _number(piece) is not None else _split(piece, re.compile(","))
    return [piece.strip() for piece in found if piece.strip()]


def parsed(latex: str) -> tuple[Any, ...]:
    """What math-verify reads: a sympy expression and a text, or nothing. Runs in a worker."""
    match = REVERSED.fullmatch(latex)
    if match and not LETTERS.search(match["value"]):  # "2 = x" as "x = 2", which math-verify can compare with 2
        latex = f"{match['name']}={match['value']}"
    value = _repeating(latex)
    if value is None and SCALED.search(latex) and not PERCENT.search(latex):  # to math-verify 1e3 is a product with e
        value = _number(latex)
    if value is not None:
        latex = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return _parsed(latex)


def verified(answer: str, right: str) -> bool:
    """What math-verify says, but for numbers that it compares by too few digits or does not compare at all. Runs in a
    worker."""
    from math_verify import verify

    if any(APART.search(one) or APART.search(TEXT.sub(" ", one)) for one in (answer, right)):
        return False
    if len({base[1] for one in (answer, right) if (base := BASE.search(one))}) > 1:
        return False
    theirs, ours = parsed(right), parsed(answer)
    if not theirs or not ours:
        return False
    if verify(list(theirs), list(ours), timeout_seconds=0, allow_set_relation_comp=True):
        return _near(theirs[0], ours[0])
    return _equal_numbers(theirs[0], ours[0])


def _parts_equal(answer: str, right: str) -> bool:
    easy = easily_equal(answer, right)
    return verified(answer, right) if easy is None else easy


def _equal_in_any_order(ours: list[str], theirs: list[str]) -> bool:
    left = list(theirs)
    for one in ours:
        place = next((index for index, other in enumerate(left) if _parts_equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _equal_in_order(ours: list[str], theirs: list[str]) -> bool:
    """Are two lists equal one by one? Those of values with names (y=1, x=2) are put into the order of the names."""
    one, other = (sorted(some) if all(ASSIGNMENT.match(part) for part in some) else some for some in (ours, theirs))
    return len(one) == len(other) <= MOST_PARTS and all(_parts_equal(*pair) for pair in zip(one, other, strict=True))


def _number(latex: str) -> Fraction | None:
    """The value of an answer that is a number, with or without a unit; 5! is none."""
    return None if latex.endswith("!") else normalise_number(latex)


def _repeating(latex: str) -> Fraction | None:
    r"""The value of 0.1\overline{6}, a sixth; None if the answer is no such number."""
    match = REPEATING.fullmatch(latex)
    if match is None:
        return None
    whole, first, period = match.groups()
    before = f"{whole}{first}"
    tail = int(before + period) - (int(before) if before.strip("-") else 0)
    return Fraction(tail, 10 ** len(first) * (10 ** len(period) - 1))


def _is_set(latex: str) -> bool:
    return latex.startswith(r"\{") and latex.endswith(r"\}")


def _in_parentheses(latex: str) -> bool:
    """One tuple or interval: "(1, 2]", but not "(1, 2), (3, 4)"."""
    return latex[:1] in ("(", "[") and _closes_at_end(latex)


def _closes_at_end(latex: str) -> bool:
    levels = accumulate((one in "([{") - (one in ")]}") for one in latex)
    return next((place for place, level in enumerate(levels) if level == 0), None) == len(latex) - 1


def _split(latex: str, separator: re.Pattern[str]) -> list[str]:
    """Split at the separators that are in no brackets."""
    pieces, begin, level, position = [], 0, 0, 0
    while position < len(latex):
        match = separator.match(latex, position) if level == 0 else None
        if match:
            pieces.append(latex[begin : match.start()])
            begin = position = match.end()
            continue
        level += (latex[position] in "([{") - (latex[position] in ")]}")
        position += 1
    return [*pieces, latex[begin:]]


def _words(latex: str) -> str:
    r"""The answer as text, without white space that has no meaning: \text{C, E} is "C,E", 5 \text{ ft} is "5ft"."""
    return UNIT_SPACE.sub("", spelling(TEXT.sub(r"\1", latex)))


def _chosen(letter: str, choice: str) -> bool:
    """True if the second is the choice with this letter: "C" and "C. x = 42"."""
    first, second = LETTER.fullmatch(letter), CHOICE.fullmatch(choice)
    return bool(first and second and first[1] == second["letter"])


@lru_cache(maxsize=1_000)
def _parsed(latex: str) -> tuple[Any, ...]:
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


def _near(first: Any, second: Any) -> bool:
    """False for numbers that are far apart for their size, also in tuples, sets and equations: math-verify takes
    1/2^{99} and 1/2^{98} as equal."""
    import sympy

    if first == second:
        return True
    if isinstance(first, sympy.Eq) and (not isinstance(second, sympy.Eq) or first.lhs == second.lhs):
        return _near(first.rhs, second.rhs if isinstance(second, sympy.Eq) else second)
    if isinstance(second, sympy.Eq) and not isinstance(first, sympy.Eq):
        return _near(first, second.rhs)
    if isinstance(first, sympy.FiniteSet) and isinstance(second, sympy.FiniteSet):
        return all(any(_near(one, other) for other in second) for one in first)
    if isinstance(first, sympy.Tuple | sympy.Set) and type(first) is type(second):
        return all(_near(*pair) for pair in zip(first.args, second.args, strict=False))
    if not (getattr(first, "is_number", False) and getattr(second, "is_number", False)):
        return True
    gap, sizes = _size(first - second), [_size(first), _size(second)]
    if gap is None or None in sizes:
        return True
    return bool(gap <= max(sizes) * float(RELATIVE)) or bool((first - second).equals(0))


def _equal_numbers(first: Any, second: Any) -> bool:
    """Equal as complex numbers, where i is the only letter, or as decimals in their first six places."""
    import sympy

    if not (isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr)):
        return False
    letters = first.free_symbols | second.free_symbols
    if {letter.name for letter in letters} == {"i"}:
        return bool(sympy.simplify((first - second).subs(dict.fromkeys(letters, sympy.I))) == 0)
    if first.is_number and second.is_number and (first.has(sympy.Float) or second.has(sympy.Float)):
        gap = _size(first - second)
        near = gap is not None and bool(gap < 0.5 / 10**PLACES or gap <= ROUNDING * (_size(first) or 0))
        return near and _near(first, second)
    return False


def _size(number: Any) -> Any:
    """Its absolute value as a sympy float, which has no smallest or largest; None if it is infinite or undefined."""
    value = abs(number.doit().evalf(15))
    return value if value.is_comparable and value.is_finite else None
