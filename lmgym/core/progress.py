"""What this process is doing, and how far it is, for whoever waits for it. No torch.

Code that may take seconds says so with `doing`, and counts with `counted` or `count`: this prints nothing and costs
next to nothing. While a command runs, `told` reads it in a thread and says it where nothing else is printed."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmgym.core.output import columns_of, styled
from lmgym.core.visible import visible

T = TypeVar("T")
SILENCE = 2.5  # seconds without a word, after which a file or a pipe gets a line
OFTEN, RARELY = 30, 60.0  # so many such lines come as soon as that, then one a minute


@dataclass
class Work:
    """Something that takes its time. Example: Work("updating", "3 of 12 passes").sentence() is "updating, 3 of 12
    passes, 0 s" """

    what: str
    count: str = ""
    began: float = field(default_factory=time.monotonic)

    def sentence(self) -> str:
        """The work, how far it is, and for how many seconds it has been done."""
        counted = f", {self.count}" if self.count else ""
        return f"{self.what}{counted}, {time.monotonic() - self.began:.0f} s"


_works: list[Work] = []  # of the main thread, the innermost last


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what the body does, or as a decorator what a function does. Other threads than the main one say nothing.

    Example: with doing("saving"): ..."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    work = Work(what)
    _works.append(work)
    try:
        yield
    finally:
        _works.remove(work)


def count(done: int, total: int, unit: str) -> None:
    """Say how far the innermost work is. Example: count(12, 64, "answers")"""
    if total > 1 and threading.current_thread() is threading.main_thread() and _works:
        _works[-1].count = f"{done:,} of {total:,} {unit}"


def counted(things: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """Iterate, and say how many are done. Example: for rows in counted(parts, "updating", "passes"): ..."""
    with doing(what):
        for number, thing in enumerate(things):
            count(number, len(things), unit)
            yield thing


class Teller:
    """Says what is being done, while nothing else is printed: on a terminal each second, in a line that goes again;
    elsewhere a line after SILENCE seconds, and rarely after OFTEN of them. A display with a live line gives `show`.

    Example: Teller([sys.stdout, sys.stderr]).tell()"""

    def __init__(self, streams: Sequence[Any]) -> None:
        self.streams = [styled(stream) for stream in streams]
        self.errors = self.streams[-1]
        self.show: Callable[[str], None] | None = None
        self.terminal = bool(self.errors.isatty())
        self._lock, self._shown, self._said, self._lines = threading.RLock(), False, 0.0, 0
        for stream in self.streams:
            stream.before_write = self.clear

    def tell(self) -> None:
        """Say what is done now, if it is time."""
        works = _works[-1:]  # a copy: the main thread goes on
        now = time.monotonic()
        quiet = now - max(self._said, *(stream.written for stream in self.streams))
        if not works:
            return
        work = works[0]
        if self.show is not None or self.terminal:
            if quiet >= 1 and work.began <= now - 1:
                (self.show or self._line)(work.sentence())
        elif quiet >= (SILENCE if self._lines < OFTEN else RARELY):
            self._lines += 1
            self.errors.write(f"lmgym: {visible(work.sentence())}\n")

    def _line(self, sentence: str) -> None:
        text = visible(f"lmgym: {sentence}")[: (columns_of(self.errors) or 80) - 1]
        with self._lock:
            self._pass(f"\r\x1b[2K{text}")
            self._shown, self._said = True, time.monotonic() - 0.1

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        with self._lock:
            if self._shown:
                self._shown = False
                self._pass("\r\x1b[2K")

    def _pass(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.errors.stream.write(text)
            self.errors.stream.flush()

    def close(self) -> None:
        for stream in self.streams:
            stream.before_write = None
        self.clear()


_teller: Teller | None = None


@contextmanager
def told() -> Iterator[None]:
    """Tell the user what is being done in the body, on standard error, where nothing is printed for some seconds.
    Nothing while a command only waits for its user, since no work is said then."""
    global _teller
    if _teller is not None or not all(hasattr(stream, "styled") for stream in (sys.stdout, sys.stderr)):
        yield
        return
    teller, ended = Teller([sys.stdout, sys.stderr]), threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            teller.tell()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    _teller = teller
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)
        teller.close()
        _teller = None


def show_with(show: Callable[[str], None] | None) -> None:
    """Give the sentences, about one a second, to a display (in a thread of its own), or (None) print them again."""
    if _teller is not None:
        _teller.clear()
        _teller.show = show
