"""Standard output and error that may fail (a full disk, a closed pipe, half a surrogate pair) and end nothing, and on
which no words can steer a terminal."""

import io
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from lmgym.core.visible import harmless


class SurvivingOutput:
    """A text stream that drops what cannot be written, and keeps the error as `lost`. All else is the stream's own.
    `written` is when something was last written (time.monotonic); `before_write` is called before.

    A file's stream is written without its buffer: text that waits in a buffer would fail again when Python exits.

    Example:
        >>> output = SurvivingOutput(open("/dev/full", "w"))
        >>> print("hello", file=output); output.lost
        OSError(28, 'No space left on device')
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream: Any = stream or io.StringIO()  # Python has no stream where the caller has closed the descriptor
        self.lost: OSError | None = None
        self.written = time.monotonic()
        self.before_write: Callable[[], None] | None = None
        # Other kinds of stream (a notebook's, a test's) do not write to their descriptor, if they have one at all.
        self._descriptor = stream.fileno() if type(stream) is io.TextIOWrapper and _is_file(stream) else None

    def write(self, text: str) -> int:
        """Write the text. Returns its length, as every stream does, whether it was written or not."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        data = text.encode(encoding, "backslashreplace")
        if self.before_write is not None:
            self.before_write()
        self.written = time.monotonic()
        try:
            if self._descriptor is None:
                self.stream.write(data.decode(encoding))
            else:
                self.stream.flush()  # what others have written to the stream comes first
                while data:
                    data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self.lost = error
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self.stream.flush()
        except OSError as error:
            self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class HarmlessOutput:
    """A text stream that survives, and on which nothing that is printed can steer a terminal: not the words of data,
    models and files, nor those of libraries and tracebacks. `styled` is the stream below, for the few who write colours
    and move the cursor, and make all words visible before.

    Example:
        >>> output = HarmlessOutput(io.StringIO())
        >>> print("\\x1b]0;title\\x07", file=output); output.styled.stream.getvalue()
        '␛]0;title␇\\n'
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.styled = SurvivingOutput(stream)

    def write(self, text: str) -> int:
        """Write the text with visible signs in place of control characters. Returns the length of the text."""
        self.styled.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


def styled(stream: Any) -> SurvivingOutput:
    """A stream for colours and the like; who writes to it makes all words visible before."""
    if isinstance(stream, HarmlessOutput):
        return stream.styled
    return stream if isinstance(stream, SurvivingOutput) else SurvivingOutput(stream)


def open_standard_files() -> None:
    """Open descriptors 0 to 2 that the caller has closed on /dev/null: else the next file that is opened would get what
    is printed, and programs that are started would have none. sys.stdin is then empty, and never None."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    if sys.stdin is None:  # Python has no stream where descriptor 0 was closed
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for the rest of the process)


@contextmanager
def surviving_output() -> Iterator[HarmlessOutput]:
    """In the body, sys.stdout (which is yielded) and sys.stderr survive and are harmless.

    An exception that nobody has foreseen is printed here, and the process ends: Python itself would write its words to
    the terminal as they are."""
    open_standard_files()
    before = sys.stdout, sys.stderr
    output, errors = HarmlessOutput(sys.stdout), HarmlessOutput(sys.stderr)
    sys.stdout, sys.stderr = output, errors  # type: ignore[assignment]
    try:
        yield output
    except Exception:
        print(traceback.format_exc(), end="", file=errors)
        raise SystemExit(1) from None
    finally:
        sys.stdout, sys.stderr = before


def columns_of(stream: Any) -> int | None:
    """The number of columns that a stream can show: of its terminal, or COLUMNS where that is set. None for a file or a
    pipe, whose lines may have any length."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    with suppress(OSError, ValueError, AttributeError):  # no descriptor, or none of a terminal
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def rich_settings() -> dict[str, Any]:
    """How rich's console is to print: words as they are. Where COLUMNS or LINES is 0, as some terminals within editors
    set them, it is told its size too: it would take the 0, and print nothing. Else it follows its terminal.

    Example: rich.console.Console(**rich_settings())"""
    size = shutil.get_terminal_size()  # for which 0 is unknown
    known = (("COLUMNS", "width", size.columns), ("LINES", "height", size.lines))
    sizes = {argument: own for name, argument, own in known if (given := os.environ.get(name)) and not given.strip("0")}
    return {"markup": False, "emoji": False, "highlight": False, **sizes}


def _is_file(stream: io.TextIOWrapper) -> bool:
    with suppress(OSError, ValueError):  # a closed stream has no descriptor
        return isinstance(stream.buffer, io.BufferedWriter) and stream.fileno() >= 0
    return False
