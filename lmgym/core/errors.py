"""The exception for mistakes that a user can correct, warnings, and foreign exceptions as short sentences."""

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmgym.core.visible import visible_lines

LONGEST_MESSAGE = 1000  # characters
_warned: set[str] = set()  # the sentences of `warn`


class LmgymError(Exception):
    """A mistake that the user can correct; the message is one clear sentence of at most LONGEST_MESSAGE characters.

    It names the file, line or key and says what would be right. The command line prints it without a traceback and
    exits with status 1; in Python it is an ordinary exception.

    Example: raise LmgymError("lmgym/recipes/a.yaml: unknown key 'stepz'; did you mean 'steps'?")"""

    def __init__(self, message: object = "", *more: object) -> None:
        super().__init__(shortened(visible_lines(message)), *more)


def warn(sentence: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Python's warning with a sentence that may quote anything: what could steer a terminal is made visible."""
    _warned.add(visible_lines(sentence))
    warnings.warn(visible_lines(sentence), category, stacklevel + 1)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """In the body, the sentences of `warn` are printed as they are. Python would add a file, a line and some code; for
    the warnings of libraries it still does."""
    python = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        if str(message) in _warned:
            print(f"lmgym: {message}", file=sys.stderr)
        else:
            python(message, category, filename, lineno, *more)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = python


def shortened(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """The text; of a longer one, the beginning and the end with "..." in between, `limit` characters in all.

    Example: shortened("0123456789" * 100, 11) -> '01234...789'"""
    if len(text) <= limit:
        return text
    tail = (limit - 3) * 2 // 5
    return f"{text[: limit - 3 - tail]}...{text[len(text) - tail :]}"


def describe(error: BaseException, limit: int = LONGEST_MESSAGE // 2) -> str:
    """The type of an exception and the first line of its message, `limit` characters at most. The message may come from
    anywhere: from a user's code, a library or a server.

    Example: describe(ValueError("no such move\\n(try again)")) -> 'ValueError: no such move'"""
    return shortened(": ".join(filter(None, [type(error).__name__, reason(error, limit)])), limit)


def reason(error: BaseException, limit: int = LONGEST_MESSAGE // 2) -> str:
    """The first line of an exception's message, `limit` characters at most; empty if its `__str__` raises."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # any code may define __str__
        return ""
    return shortened(lines[0], limit) if lines else ""


def represent(value: object, limit: int = LONGEST_MESSAGE // 4) -> str:
    """The `repr` of a value, `limit` characters at most; its type's name if `__repr__` raises."""
    try:
        return shortened(repr(value), limit)
    except Exception:  # any code may define __repr__
        return f"a {type(value).__name__}"


def place(error: BaseException, *calling: str) -> str:
    """Where a foreign exception was raised: " at FILE:LINE", empty if that is not known.

    The first frame outside of the files `calling` is the user's; the line is the innermost one in that file, since
    deeper frames may be in libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    skipped = (*calling, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in skipped]
    if not frames:
        return ""
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" at {last.filename}:{last.lineno}"
