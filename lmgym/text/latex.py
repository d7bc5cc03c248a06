r"""Reading LaTeX as far as answers need it: what stands in a box, and one spelling of what has several.

Nothing here parses mathematics, raises, or takes more than linear time.
"""

import re

BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*+\{)|\\.|[{}]", re.DOTALL)
BOX = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))|\\.", re.DOTALL)
FRACTION = re.compile(r"\\[dt]?frac(?![A-Za-z])")
ARGUMENT = re.compile(r"\s*+(?:(?P<plain>[0-9A-Za-z]|\\[A-Za-z]++)|(?=\{))")  # of \frac: one token, or a group
GLUE = re.compile(  # but for the end of a matrix's row, which is no space
    r"(?P<row>\\\\)|\\[,;:! ]|~|\\(?:quad|qquad|left|right|big|Big|bigg|Bigg)(?![A-Za-z])"
    r"|\\phantom\s*+(?:\{[^{}]*+\}|[^\\{])"
)
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
APPROXIMATELY = re.compile(r"^\\approx(?![A-Za-z])\s*+")
TRAILING = " \t\r\n.,;:"
SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # all but that between two letters or digits: "1 2/3" is not "12/3"


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Start and end of what is in each \boxed{...} or \fbox{...} whose braces balance, in the order of their ends.

    Example:
        >>> [text[start:end] for start, end in boxes(text := r"\boxed{\frac{1}{2}} or \boxed{3")]
        ['\\frac{1}{2}']
    """
    if "box" not in text:
        return []
    found: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []
    for match in BRACES.finditer(text):
        if match["box"] or match[0] == "{":
            opened.append((match.end(), bool(match["box"])))
        elif match[0] == "}" and opened:
            start, boxed = opened.pop()
            if boxed:
                found.append((start, match.start()))
    return found


def has_box(text: str) -> bool:
    r"""True if there is a \boxed or \fbox, with braces or without, closed or not."""
    return _last_box(text) is not None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} or \fbox{...}, nested braces and all; None without one.

    It is None too where the last one has no braces (\boxed 5) or is never closed: an answer that was cut off is no
    answer, whatever stood in an earlier box. Source: LLM_RL's reward, after Hendrycks et al. 2021 (arXiv 2103.03874).

    Example:
        >>> last_boxed(r"so \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{4}, no, \boxed{5")
        ('\\frac{1}{2}', None)
    """
    begin = _last_box(text)
    if begin is None:
        return None
    rest = text[begin:]
    inside = [rest[start:end] for start, end in boxes(rest)]
    return inside[0] if inside else None


def tidied(latex: str) -> str:
    r"""The same in one spelling: without dollars around it, full stops behind it, thin spaces, phantoms, sizes of
    brackets and commas between thousands that are LaTeX's own; fractions with braces.

    Example:
        >>> tidied(r"$\dfrac \pi4 + 5{,}525.$")
        '\\frac{\\pi}{4} + 5525'
    """
    latex = APPROXIMATELY.sub("", latex.strip(TRAILING))
    for left, right in DELIMITERS:
        if latex.startswith(left) and latex.endswith(right) and len(latex) >= len(left + right):
            latex = latex[len(left) : -len(right)].strip(TRAILING)
    latex = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))", "", latex)
    return _with_braces(GLUE.sub(lambda match: match["row"] or " ", latex)).strip(TRAILING)


def spelling(latex: str) -> str:
    """What two answers have in common that differ in white space only.

    Example:
        >>> spelling(r"( 1, \\frac{1} {2} )")
        '(1,\\\\frac{1}{2})'
    """
    return SPACE.sub("", latex.strip())


def depth(latex: str) -> int:
    """How deep its braces, brackets and parentheses are nested.

    Example:
        >>> depth("{(1)}")
        2
    """
    now = deepest = 0
    for character in latex:
        if character in "{([":
            now += 1
            deepest = max(deepest, now)
        elif character in "})]":
            now -= 1
    return deepest


def _last_box(text: str) -> int | None:
    """Where the last box begins."""
    if "box" not in text:
        return None
    return max((match.start() for match in BOX.finditer(text) if match["box"]), default=None)


def _with_braces(latex: str) -> str:
    r"""\frac12 and \frac\pi 2 as TeX reads them: an argument without braces is one token."""
    pieces, place = [], 0
    for match in FRACTION.finditer(latex):
        if match.start() < place:
            continue
        pieces.append(latex[place : match.start()] + r"\frac")
        place = match.end()
        for _ in range(2):
            argument = ARGUMENT.match(latex, place)
            if argument is None or argument["plain"] is None:
                break
            pieces.append("{" + argument["plain"] + "}")
            place = argument.end()
    return "".join(pieces) + latex[place:]
