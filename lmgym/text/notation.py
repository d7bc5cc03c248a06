r"""Mathematics as people type it (x**2, sqrt(3), 2π, 45°) turned into LaTeX.

Nothing here understands mathematics. No function raises, or takes more than linear time."""

import re

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
