"""What test_workers.py has worker processes call."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

prepared: list[int] = []


def odd(item: list[Any]) -> Any:
    """Does what the item says."""
    kind, *rest = item
    if kind == "echo":
        print("this is no answer")
        return rest[0]
    if kind == "sleep":
        time.sleep(rest[0])
    if kind == "loop":
        while True:
            pass
    if kind == "power":  # one call in C, which no Python signal handler interrupts
        return len(bin(3 ** (10**9)))
    if kind == "memory":
        return len(bytearray(10**10))
    if kind == "raise":
        raise ValueError("no")
    if kind == "signal":
        os.kill(os.getpid(), getattr(signal, rest[0]))
    if kind == "exit":
        os._exit(3)
    if kind == "kill supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if kind == "kill supervisor at first":  # as long as a file has fewer letters than this
        path, times = rest
        with open(path, "a+") as file:
            file.seek(0)
            if len(file.read()) < times:
                file.write("x")
                file.flush()
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
    if kind == "no json":
        return {1, 2}
    if kind == "loaded":
        return [name in sys.modules for name in ("torch", "transformers", "pytest")]
    return [os.getpid(), os.getppid(), len(prepared)]


odd.prepare = lambda: prepared.append(1)  # type: ignore[attr-defined]


def unprepared(item: Any) -> Any:
    """Never called."""


def _fail() -> None:
    raise RuntimeError("no model here")


unprepared.prepare = _fail  # type: ignore[attr-defined]


def unready(item: Any) -> Any:
    """Never called: its preparation does not end. It notes the number of its process."""


def _hang(note: str) -> None:
    Path(note).write_text(str(os.getpid()))
    time.sleep(1000)


unready.prepare = _hang  # type: ignore[attr-defined]
