"""Words of data, files and models on their way to a terminal, a log or a warning: what steers a terminal, cannot be
seen or turns a text around is shown by signs.

Everything that is printed passes through `harmless` (core/output.py), errors and warnings through `visible_lines`
(core/errors.py); `visible` makes one line, for what is laid out; `escaped` is for JSON, which must keep its data."""

import re
import unicodedata

JOINERS = "\u200c\u200d"  # invisible, but needed in some scripts and emoji
CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's categories: control, format, half a surrogate pair, line ends
NOT_PLAIN = re.compile(r"[^ -~]")  # all others are themselves


def visible(text: object) -> str:
    """The text as one line, in which control and invisible characters are replaced by visible signs.

    Example: visible("a\\x1b[2Jb\\u202e\\n") -> 'a␛[2JbU+202E⏎'"""
    return NOT_PLAIN.sub(lambda found: _sign(found[0]), str(text))


def visible_lines(text: object) -> str:
    """As `visible`, but with the text's own line breaks.

    Example: visible_lines("a\\x1b[2Jb\\nc") -> 'a␛[2Jb\\nc'"""
    return "\n".join(map(visible, str(text).split("\n")))


def harmless(text: str) -> str:
    """As `visible_lines`, but with its tabs, and with the carriage returns at both ends, which progress bars need."""
    body = text.strip("\r")
    if body.isascii() and body.isprintable():
        return text
    start = len(text) - len(text.lstrip("\r"))
    kept = NOT_PLAIN.sub(lambda found: found[0] if found[0] in "\n\t" else _sign(found[0]), body)
    return text[:start] + kept + text[start + len(body) :]


def escaped(json: str) -> str:
    """JSON text with hidden characters as escapes, so that it holds the same data and can be printed.

    Example: escaped('"\\x9b\\u202e é"') -> '"\\\\u009b\\\\u202e é"'"""
    return NOT_PLAIN.sub(lambda found: found[0] if found[0] == "\n" else _escape(found[0]), json)


def is_hidden(character: str) -> bool:
    """True for a character that is a command to a terminal, or cannot be seen."""
    return unicodedata.category(character) in CONTROL and character not in JOINERS


def _sign(character: str) -> str:
    if character in "\n\u2028\u2029":
        return "⏎"
    if character == "\t":
        return " "
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + code) if code < 0x20 else "␡"
    return f"U+{code:04X}" if is_hidden(character) else character


def _escape(character: str) -> str:
    if not is_hidden(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place] << 8 | units[place + 1]:04x}" for place in range(0, len(units), 2))
