r"""LaTeX of final answers: the contents of \boxed{...}, and one normal form for answers that are written differently.

Nothing here understands mathematics. No function raises, or takes more than linear time.
"""

import re

BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*+\{)|\\.|[{}]", re.DOTALL)
BOX = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))|\\.", re.DOTALL)
FRACTION = re.compile(r"\\[dt]?frac(?![A-Za-z])")
ARGUMENT = re.compile(r"\s*+(?:(?P<plain>[0-9A-Za-z]|\\[A-Za-z]++)|(?=\{))")  # of \frac: one token, or a group
SPACING = re.compile(  # not the end of a matrix's row (\\), which is matched apart
    r"(?P<row>\\\\)|\\[,;:! ]|~|\\(?:quad|qquad|left|right|big|Big|bigg|Bigg)(?![A-Za-z])"
    r"|\\phantom\s*+(?:\{[^{}]*+\}|[^\\{])"
)
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
APPROXIMATELY = re.compile(r"^\\approx(?![A-Za-z])\s*+")
TRAILING = " \t\r\n.,;:"
SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # except between two letters or digits: "1 2/3" is not "12/3"


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Start and end of the contents of each \boxed{...} or \fbox{...} that is closed, in the order of their ends.

    Example: [text[start:end] for start, end in boxes(text := r"\boxed{\frac{1}{2}} or \boxed{3")] -> ['\\frac{1}{2}']
    """
    if "box" not in text:
        return []
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []  # open braces: where their contents begin, and whether they are a box's
    for match in BRACES.finditer(text):
        if match["box"] or match[0] == "{":
            opened.append((match.end(), bool(match["box"])))
        elif match[0] == "}" and opened:
            start, boxed = opened.pop()
            if boxed:
                spans.append((start, match.start()))
    return spans


def has_box(text: str) -> bool:
    r"""True if the text has a \boxed or \fbox, with or without braces, closed or not."""
    return _last_box(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...} or \fbox{...}, with nested braces; None without one.

    Also None if the last one has no braces (\boxed 5) or is not closed: an answer that was cut off does not count, even
    if there is an earlier box. Source: the reward of LLM_RL, after Hendrycks et al. 2021 (arXiv 2103.03874).

    Example: last_boxed(r"so \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{4}, no, \boxed{5") -> ('\\frac{1}{2}', None)
    """
    begin = _last_box(text)
    if begin is None:
        return None
    rest = text[begin:]
    inside = [rest[start:end] for start, end in boxes(rest)]
    return inside[0] if inside else None


def tidied(latex: str) -> str:
    r"""A normal form of a LaTeX answer.

    Removed: dollars around it, punctuation at its end, LaTeX's own spaces, phantoms, sizes of brackets and commas
    between thousands. The arguments of fractions get braces.

    Example: tidied(r"$\dfrac \pi4 + 5{,}525.$") -> '\\frac{\\pi}{4} + 5525'
    """
    latex = APPROXIMATELY.sub("", latex.strip(TRAILING))
    for left, right in DELIMITERS:
        if latex.startswith(left) and latex.endswith(right) and len(latex) >= len(left + right):
            latex = latex[len(left) : -len(right)].strip(TRAILING)
    latex = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))", "", latex)
    return _with_braces(SPACING.sub(lambda match: match["row"] or " ", latex)).strip(TRAILING)


def spelling(latex: str) -> str:
    """The answer without white space that has no meaning, to compare answers.

    Example: spelling(r"( 1, \\frac{1} {2} )") -> '(1,\\\\frac{1}{2})'
    """
    return SPACE.sub("", latex.strip())


def depth(latex: str) -> int:
    """The depth to which braces, brackets and parentheses are nested: depth("{(1)}") -> 2"""
    current = deepest = 0
    for character in latex:
        if character in "{([":
            current += 1
            deepest = max(deepest, current)
        elif character in "})]":
            current -= 1
    return deepest


def _last_box(text: str) -> int | None:
    """The index at which the last box begins."""
    if "box" not in text:
        return None
    return max((match.start() for match in BOX.finditer(text) if match["box"]), default=None)


def _with_braces(latex: str) -> str:
    r"""Put braces around the arguments of \frac12 and \frac\pi 2: in TeX an argument without braces is one token."""
    pieces, position = [], 0
    for match in FRACTION.finditer(latex):
        if match.start() < position:
            continue
        pieces.append(latex[position : match.start()] + r"\frac")
        position = match.end()
        for _ in range(2):
            argument = ARGUMENT.match(latex, position)
            if argument is None or argument["plain"] is None:
                break
            pieces.append("{" + argument["plain"] + "}")
            position = argument.end()
    return "".join(pieces) + latex[position:]
