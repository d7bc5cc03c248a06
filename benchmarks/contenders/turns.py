"""How a contender talks to the driver: it waits for a line, runs one step, and answers with one line of JSON.

Whatever else is printed goes to stderr, so that a library's own messages cannot be taken for an answer.
"""

import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Turns:
    """One side of the conversation, and the stopwatch of a step. On a GPU a part ends when its kernels have ended.

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
        self._peaks: dict[str, int] = {}
        self._highest = 0
        self._cpu = 0.0

    def ready(self, **about: Any) -> None:
        """Say that everything is loaded; `about` are versions and settings as they have come into force."""
        self._say({"ready": about})

    def wait(self) -> bool:
        """Wait for the driver, then start the stopwatch; False when the driver has hung up."""
        called = bool(sys.stdin.readline())
        self._peak()
        self._peaks = {}
        self._marks, self._cpu = [("start", time.perf_counter())], time.process_time()
        return called

    def mark(self, part: str) -> None:
        """The part of the step that ends here."""
        if gpu := _gpu():
            gpu.synchronize()
        self._marks.append((part, time.perf_counter()))
        self._peaks[part] = self._peak()

    def answer(self) -> None:
        """The seconds of the step and of its parts, the seconds that its threads were on a core, all together, and the
        most memory (bytes) that each part has held, and this process at any time so far."""
        now, cpu = time.perf_counter(), time.process_time() - self._cpu
        parts = {part: end - begun for (_, begun), (part, end) in zip(self._marks[:-1], self._marks[1:], strict=True)}
        self._peak()
        self._say(
            {
                "seconds": now - self._marks[0][1],
                "cpu_seconds": cpu,
                "parts": parts,
                "peaks": self._peaks,
                "peak_bytes": self._highest,
            }
        )

    def _peak(self) -> int:
        """The most memory since this was asked last."""
        peak = peak_bytes()
        forget_peak()
        self._highest = max(self._highest, peak)
        return peak

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")


def peak_bytes() -> int:
    """Peak memory: of the GPU's tensors where this process computes on one, else what is resident. There it is Linux's
    VmHWM where it is: unlike ru_maxrss, it does not start with what the parent held when it forked."""
    if gpu := _gpu():
        return gpu.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Let the peak begin anew with what is held now; where the system does not allow it, peaks only ever rise."""
    if gpu := _gpu():
        gpu.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM


def _gpu() -> Any:
    """torch.cuda where this process uses it, else None; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
