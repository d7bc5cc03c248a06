r"""LaTeX of final answers: the contents of \boxed{...}, and one normal form for answers that are written differently.

Nothing here understands mathematics. No function raises, or takes more than linear time."""

import re

BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*+\{)|\\.|[{}]", re.DOTALL)
BOX = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))|\\.", re.DOTALL)
# What may stand between two boxes of one answer: "and", "or", a comma, perhaps with up to four words before it
# (\boxed{1} cat and \boxed{2} dogs) and a name after it (x = \boxed{1}, y = \boxed{2}). A correction does not link.
FRAME = re.compile(r"\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])|\\(?:text|textbf|mathrm|mbox)\s?\{|[${}*~]|\s")
LINK = re.compile(
    r" *(?:(?!(?:and|or|no|not|wait|but|so|thus|hence|then|wrong|instead|rather|actually|maybe)\b)"
    r"\(?[A-Za-z]++\)?(?: ++|(?=[,;]))){0,4}+"
    r"(?:[,;](?: *+(?:and|or)\b)?|(?:and|or)\b) *+(?:\\?[A-Za-z]++(?: ?_ ?[0-9A-Za-z]++)? *+= *+)?"
)
LONGEST_LINK = 100  # characters between two boxes of one answer
ARGUMENTS = re.compile(r"\\(?:(?P<fraction>[dtc]?frac)|sqrt)(?![A-Za-z])(?P<index>\s?\[[^\[\]]*+\])?+")
ARGUMENT = re.compile(r"\s*+(?:(?P<plain>[0-9A-Za-z]|\\[A-Za-z]++)|(?=\{))")  # one token, or a group
SPACING = re.compile(  # not the end of a matrix's row (\\), which is matched apart
    r"(?P<row>\\\\)|\\[,;:! ]|~|\\(?:quad|qquad|left|right|big|Big|bigg|Bigg)(?![A-Za-z])"
    r"|\\phantom\s*+(?:\{[^{}]*+\}|[^\\{])"
)
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
APPROXIMATELY = re.compile(r"^\\approx(?![A-Za-z])\s*+")
ANGLE = re.compile(r"^\\?m?\s?\\angle\s?[A-Z]{1,3}\s?=")  # "\angle ABC = 40^\circ"
COMMAND_SPACE = re.compile(r"(\\(?:text|textbf|textit|mathrm|mathbf|mbox|textnormal|operatorname))\s++(?=\{)")
# Digits in groups of three: 10{,}000  10,\!000  10\,000  10~000 and 10 000, but not the mixed number 1 234/567.
GROUP = r"(?:\{\s?,\s?\}|,\s?\\!|\\[,;:! ]|~)\s?"
THOUSANDS = re.compile(
    rf"(?<![0-9.,\\])[1-9][0-9]{{0,2}}(?:(?:{GROUP}[0-9]{{3}})++|(?: [0-9]{{3}})++(?!\s?/))(?![0-9])"
)
TRAILING = " \t\r\n.,;:"
LEADING = " \t\r\n,;:"
SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # except between two letters or digits: "1 2/3" is not "12/3"
# Mathematics as people type it: x**2, sqrt(3), 2π, 45°.
SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-",
        "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": r"\div ", "\u2044": "/",
        "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u00b1": r"\pm ",
        "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2208": r"\in ", "\u222a": r"\cup ",
        "\u2229": r"\cap ", "\u00b0": r"^{\circ}", "\u00b2": "^{2}", "\u00b3": "^{3}",
        "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
        "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2003": " ",
    }
)  # fmt: skip
NAMED = re.compile(r"(?<![\\A-Za-z])(?:(sqrt)(?=\s?\()|(pi|infinity)(?![A-Za-z])|(sin|cos|tan|ln|log|exp)(?=\s?[(^]))")
COMMANDS = {"infinity": r"\infty "}
POWER = re.compile(r"\^\s?(?=\()|\^(?P<digits>[0-9]{2,}+)|\^-(?P<negative>[0-9]++)")
ROOT_OR_POWER = re.compile(r"(?:\\sqrt\s?|\^)(?=\()")


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

    Example: last_boxed(r"so \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{4}, no, \boxed{5") -> ('\\frac{1}{2}', None)"""
    begin = _last_box(text)
    if begin is None:
        return None
    rest = text[begin:]
    inside = [rest[start:end] for start, end in boxes(rest)]
    return inside[0] if inside else None


def last_answer(text: str) -> str | None:
    r"""The contents of the last box and of the boxes that it is linked to by "and", "or" or a comma, with commas
    between them; equal contents count once. None as for `last_boxed`.

    Example: last_answer(r"\boxed{1} and \boxed{2}"), last_answer(r"\boxed{1}, no, \boxed{2}") -> ('1, 2', '2')"""
    last = last_boxed(text)
    begin = _last_box(text)
    if last is None or begin is None:
        return None
    parts = [last]
    for start, end in reversed([span for span in boxes(text) if span[1] < begin]):
        between = text[end + 1 : begin]
        if not between or len(between) > LONGEST_LINK or not LINK.fullmatch(FRAME.sub(" ", between)):
            break
        parts.append(text[start:end])
        begin = text.rfind("\\", 0, start)
    return ", ".join({spelling(part): part for part in reversed(parts)}.values())


def tidied(latex: str) -> str:
    r"""A normal form of a LaTeX answer.

    Removed: dollars, punctuation at its end, LaTeX's own spaces, phantoms, sizes of brackets and marks between
    thousands. The arguments of fractions and roots get braces. Plain notation becomes LaTeX (`as_latex`).

    Example: tidied(r"$\dfrac \pi4 + 5{,}525.$") -> '\\frac{\\pi}{4} + 5525'"""
    latex = COMMAND_SPACE.sub(r"\1", APPROXIMATELY.sub("", latex.strip()))
    for left, right in DELIMITERS:
        inside = latex.rstrip(TRAILING)
        if inside.startswith(left) and inside.endswith(right) and len(inside) >= len(left + right):
            latex = inside[len(left) : -len(right)].strip()
    latex = _without_dollars(latex)
    latex = THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match[0]), as_latex(latex))
    latex = SPACING.sub(lambda match: match["row"] or " ", latex)
    latex = ANGLE.sub("", latex.strip().lstrip(LEADING))
    return _trimmed(_with_braces(latex)).lstrip(LEADING)


def spelling(latex: str) -> str:
    """The answer without white space that has no meaning, to compare answers.

    Example: spelling(r"( 1, \\frac{1} {2} )") -> '(1,\\\\frac{1}{2})'"""
    return SPACE.sub("", re.sub(r"\s+", " ", latex.strip()))


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


def _without_dollars(latex: str) -> str:
    r"""Without the dollars of formulas inside ("12 $ and $ 13"); \$ stays, and so does a text of dollars only."""
    bare = re.sub(r"(?<!\\)\$", " ", latex)
    return bare if bare.strip() else latex


def _trimmed(latex: str) -> str:
    r"""Without punctuation and what is left of a command at the end, but with the row end \\."""
    latex = latex.rstrip(TRAILING)
    if latex.endswith("\\") and not latex.endswith("\\\\"):
        latex = latex[:-1].rstrip(TRAILING)
    return latex


def _with_braces(latex: str) -> str:
    r"""Put braces around the arguments of \frac12, \frac\pi 2 and \sqrt2: in TeX an argument without is one token."""
    pieces, position = [], 0
    for match in ARGUMENTS.finditer(latex):
        if match.start() < position:
            continue
        pieces.append(latex[position : match.start()])
        pieces.append(r"\frac" if match["fraction"] else r"\sqrt" + (match["index"] or "").strip())
        position = match.end()
        for _ in range(2 if match["fraction"] else 1):
            argument = ARGUMENT.match(latex, position)
            if argument is None or argument["plain"] is None:
                break
            pieces.append("{" + argument["plain"] + "}")
            position = argument.end()
    return "".join(pieces) + latex[position:]


def as_latex(text: str) -> str:
    r"""The text with the signs, names and powers of plain notation as LaTeX; LaTeX stays as it is.

    Example: as_latex("2**(1/4) + sqrt(3)/2 - 2π") -> '2^{1/4} + \\sqrt{3}/2 - 2\\pi '"""
    text = text.translate(SIGNS)
    text = NAMED.sub(lambda match: COMMANDS.get(match[0], rf"\{match[0]}" + (" " if match[2] else "")), text)
    text = POWER.sub(_power, text.replace("**", "^"))
    return _in_braces(ROOT_OR_POWER, text)


def _power(match: re.Match[str]) -> str:
    if match["digits"]:
        return "^{" + match["digits"] + "}"
    return "^{-" + match["negative"] + "}" if match["negative"] else "^"


def _in_braces(command: re.Pattern[str], text: str) -> str:
    """Turn the parentheses that follow a command into braces, where they are closed: sqrt(3) becomes sqrt{3}."""
    closing = _closing_parentheses(text)
    characters = list(text)
    for match in command.finditer(text):
        if match.end() in closing:
            characters[match.end()], characters[closing[match.end()]] = "{", "}"
    return "".join(characters)


def _closing_parentheses(text: str) -> dict[int, int]:
    """Where each parenthesis that is closed is closed."""
    opened: list[int] = []
    closing = {}
    for place, character in enumerate(text):
        if character == "(":
            opened.append(place)
        elif character == ")" and opened:
            closing[opened.pop()] = place
    return closing
