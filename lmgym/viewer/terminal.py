"""`lmgym view RUN --text`: curves, steps, groups and answers in a terminal, driven by keys; for a machine over ssh.

It draws what the page draws, from the same trees (addresses.py). All texts are made by `words` (screens.py)."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from lmgym.core.errors import LmgymError
from lmgym.core.output import rich_settings, styled
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.screens import Screen, curves_screen, words

if TYPE_CHECKING:
    from rich.console import Console

HELP = "j k: move   l: open   h: back   /: filter   c: colour   ?: keys   q: end"
ARROWS = {"\x1b[A": "k", "\x1b[B": "j", "\x1b[C": "l", "\x1b[D": "h", "\x1b[5~": "u", "\x1b[6~": "d", "\r": "l"}
KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1b|.", re.DOTALL)
LONG_HELP = (
    "j, k or arrows   next, previous row",
    "d, u or page keys   a page down, up;  g, G: first, last row",
    "l, Enter   open the row: a metric, a step, a group, an answer",
    "h   back up;  q or Ctrl-C: end",
    "/   filter: words that a row must contain; on a step score<0.5 truncated -selected seconds/environment>2 ...",
    "c   colour an answer's tokens by the next number",
    "r   read the run again, while it trains",
)


def show(runs: Sequence[RunRecords]) -> None:
    """Show runs in the terminal until the user presses q. Raises LmgymError if the output is not a terminal."""
    from rich.console import Console

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LmgymError("`lmgym view --text` needs a terminal; run it in one, or write a file with --html")
    console = Console(file=cast(TextIO, styled(sys.stdout)), **rich_settings())
    with _keyboard() as keys, console.screen(hide_cursor=True):
        Terminal(console, runs).run(keys)


@contextmanager
def _keyboard() -> Iterator[Iterator[str]]:
    """The keys that are pressed, one by one, not echoed. The terminal is as before afterwards."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        data = iter(lambda: os.read(descriptor, 1024), b"")
        yield (key for part in data for key in KEY.findall(part.decode(errors="ignore").replace("\n", "\r")))
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Terminal:
    """The screens that lead to what is shown, the last one on top."""

    def __init__(self, console: "Console", runs: Sequence[RunRecords]) -> None:
        self.console, self.stack, self.message = console, [curves_screen(runs)], ""

    @property
    def screen(self) -> Screen:
        """What is shown."""
        return self.stack[-1]

    def run(self, keys: Iterator[str]) -> None:
        """Draw, and obey the keys until q."""
        self.draw()
        for key in keys:
            self.message, key = "", ARROWS.get(key, key)
            if key == "q":
                return
            try:
                self.obey(key, keys)
            except LmgymError as error:
                self.message = str(error)
            self.draw()

    def obey(self, key: str, keys: Iterator[str]) -> None:
        """Act on a key. Raises LmgymError if there is nothing to open, or if the filter cannot be read."""
        screen, page = self.screen, max(1, self.console.height - 4)
        moves = {"j": 1, "k": -1, "d": page, "u": -page, "g": -(10**9), "G": 10**9}
        if key in moves:
            screen.move(moves[key])
        elif key == "l" and screen.rows and (opened := screen.rows[screen.selected].opens):
            self.stack.append(opened())
        elif key == "h" and len(self.stack) > 1:
            self.stack.pop()
        elif key == "r":
            self.stack[-1] = screen.again()
        elif key == "c":
            screen.next_colour()
        elif key == "/":
            words, self.message = self.ask("/", keys), ""
            screen.filter(words)
        elif key == "?":
            self.draw(LONG_HELP)
            next(keys, "")

    def ask(self, prompt: str, keys: Iterator[str]) -> str:
        """A line of text, typed at the bottom; empty after Escape."""
        typed = ""
        for key in keys:
            if key in "\r\n":
                return typed
            if key == "\x1b":
                return ""
            typed = typed[:-1] if key in "\x7f\b" else typed + (key if key.isprintable() else "")
            self.message = prompt + typed
            self.draw()
        return typed

    def draw(self, over: Sequence[str] = ()) -> None:
        """Draw the screen anew: a title, as many rows as fit, and a line at the bottom."""
        width, height = self.console.width, max(5, self.console.height)
        lines = [words(self.screen.title, "bold"), *map(words, self.screen.notes)]
        shown = [*map(words, over)] or self.screen.lines(self.console, width, height - len(lines) - 1)
        lines += shown[: height - len(lines) - 1]
        lines += [words("")] * (height - 1 - len(lines))
        lines.append(words(self.message or HELP, "bold red" if self.message else "dim"))
        for line in lines:
            line.truncate(width - 1, overflow="ellipsis")
        drawn = []
        for line in lines:
            with self.console.capture() as capture:
                self.console.print(line, no_wrap=True, overflow="crop", end="")
            drawn.append(capture.get() + "\x1b[K")  # what was there before, to the line's end, goes away
        self.console.file.write("\x1b[H" + "\n".join(drawn))
        self.console.file.flush()
