"""How a contender talks to the driver: it waits for a line, runs one step, and answers with one line of JSON.

Whatever else is printed goes to stderr, so that a library's own messages cannot be taken for an answer.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """One side of the conversation, and the stopwatch of a step.

    Example:
        turns = Turns()
        turns.ready(torch=torch.__version__)
        while turns.wait():
            sample(), turns.mark("rollout")
            update(), turns.mark("update")
            turns.answer()
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._marks: list[tuple[str, float]] = []
        self._cpu = 0.0

    def ready(self, **about: Any) -> None:
        """Say that everything is loaded; `about` are versions and settings as they have come into force."""
        self._say({"ready": about})

    def wait(self) -> bool:
        """Wait for the driver, then start the stopwatch; False when the driver has hung up."""
        called = bool(sys.stdin.readline())
        self._marks, self._cpu = [("start", time.perf_counter())], time.process_time()
        return called

    def mark(self, part: str) -> None:
        """The part of the step that ends here."""
        self._marks.append((part, time.perf_counter()))

    def answer(self) -> None:
        """The seconds of the step and of its parts, the seconds that its threads were on a core, all together, and the
        most memory that this process has held so far (bytes)."""
        now, cpu = time.perf_counter(), time.process_time() - self._cpu
        parts = {part: end - begun for (_, begun), (part, end) in zip(self._marks[:-1], self._marks[1:], strict=True)}
        self._say({"seconds": now - self._marks[0][1], "cpu_seconds": cpu, "parts": parts, "peak_bytes": peak_bytes()})

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")


def peak_bytes() -> int:
    """Peak resident memory of this process. Linux's VmHWM where it is there: unlike ru_maxrss, it does not start with
    what the parent held when it forked."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
