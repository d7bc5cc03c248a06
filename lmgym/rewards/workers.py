"""Functions in processes of their own, with a limit of time and memory for each call.

For what may run away (a computer algebra system on a model's text) or is slow (a judge, a learned metric). A worker is
two processes: a supervisor, which imports the function once, and a child forked from it, which calls it (see
supervisor.py). What takes too long or too much memory, raises or crashes costs one answer and one child; the next child
is a fork away, and it has seen nothing of what came before. Supervisors are fresh interpreters, never forks of the
caller, whose torch threads no fork would survive; they import neither torch nor the caller's main script. What crosses
the pipes is JSON.
"""

import atexit
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.rewards.supervisor import PATIENCE

MOST = 8  # workers, unless a pool is told otherwise
STARTING = 120.0  # seconds in which a supervisor must have imported its function, beyond what the call may take
STILLBORN = 3  # workers in a row that die without a word, after which the pool gives up
BOOT = """import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from lmgym.rewards.supervisor import supervise
supervise(given["function"], given["memory_gib"], given["module"])
"""


@dataclass(frozen=True)
class Failure:
    """What a call came to that gave no value: out of time, a crash of its process, or an exception.

    Example: Failure("time", "took too much processor time")
    """

    kind: Literal["time", "crash", "error"]
    message: str


@dataclass
class Workers:
    """Up to `count` worker processes (by default one a core, 8 at most) for `function`, a "module:name".

    The function takes one JSON value and returns one. Where it has an attribute `prepare`, a function without
    arguments, each supervisor calls that once before any child is forked. `memory_gib` bounds the address space of a
    child (Linux). `module` is imported before the first child, besides the function's own. Workers start when they
    are needed, are used again by the next `map`, and end with `close`, with the
    process that owns them, or when that is killed; a signal to the terminal's process group does not reach them.

    Example:
        >>> with Workers("math:factorial") as workers:
        ...     workers.map([5, -1], seconds=1.0)
        [120, Failure(kind='error', message='ValueError: factorial() not defined for negative values')]
    """

    function: str
    count: int | None = None
    memory_gib: float | None = None
    module: str | None = None
    failures: Counter[str] = field(default_factory=Counter)  # of all calls so far, by kind
    _workers: list["_Worker"] = field(default_factory=list, repr=False)
    _owner: int = field(default_factory=os.getpid, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _stillborn: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise LmgymError(f"worker processes for '{self.function}': there must be at least 1, not {self.count}")

    def map(self, items: Sequence[Any], seconds: float) -> list[Any]:
        """The function's value for each item, in order, or a Failure.

        Each call may take `seconds` of processor time, so that a busy machine fails nobody, and ten times as long by
        the clock. An item whose worker was killed from outside is tried once more. Raises LmgymError where the function
        cannot be imported or prepared.
        """
        if not 0 < seconds < math.inf:
            raise LmgymError(f"a call in a worker process needs a limit above 0 seconds, not {seconds}")
        with self._lock:
            self._forget_after_fork()
            try:
                return self._map(list(items), seconds)
            except BaseException:  # a signal, say: what is on its way must not be taken for the next call's answer
                self._end()
                raise

    def close(self) -> None:
        """End the worker processes; the next `map` starts new ones."""
        with self._lock:
            self._forget_after_fork()
            self._end()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map(self, items: list[Any], seconds: float) -> list[Any]:
        results: list[Any] = [None] * len(items)
        waiting = deque(range(len(items)))
        lost: set[int] = set()
        idle, busy = list(self._workers), dict["_Worker", int]()
        most = min(self.count or default_count(), len(items))
        with selectors.DefaultSelector() as selector:
            while waiting or busy:
                while waiting and (idle or len(busy) < most):
                    worker = idle.pop() if idle else self._start()
                    busy[worker] = waiting.popleft()
                    worker.send(items[busy[worker]], seconds)
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
                patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                selector.select(patience)
                for worker in list(busy):
                    answer = worker.answer()
                    if answer is None:
                        continue
                    selector.unregister(worker.answers)
                    place = busy.pop(worker)
                    if answer.get("failure") == "lost":
                        self._workers.remove(worker)
                        answer = {"failure": "crash", "message": f"its worker ended with status {worker.kill()}"}
                        if place not in lost:
                            lost.add(place)
                            waiting.appendleft(place)
                            continue
                    else:
                        self._stillborn = 0
                        idle.append(worker)
                    results[place] = self._value(answer)
        return results

    def _value(self, answer: dict[str, Any]) -> Any:
        if "failed" in answer:
            raise LmgymError(f"worker processes for '{self.function}' cannot start: {answer['failed']}")
        if "failure" not in answer:
            return answer["value"]
        self.failures[answer["failure"]] += 1
        return Failure(answer["failure"], answer["message"])

    def _start(self) -> "_Worker":
        if self._stillborn >= STILLBORN:
            self._stillborn = 0
            raise LmgymError(
                f"worker processes for '{self.function}' die as soon as they start; what they print on standard error "
                "says why"
            )
        self._stillborn += 1
        worker = _Worker(self.function, self.memory_gib, self.module)
        self._workers.append(worker)
        return worker

    def _end(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def _forget_after_fork(self) -> None:
        """In a forked copy of the owner the workers are the owner's: let go of their pipes, and start others."""
        if self._owner != os.getpid():
            for worker in self._workers:
                worker.release()
            self._workers, self._owner = [], os.getpid()


_shared: dict[tuple[str, int | None, float | None, str | None], Workers] = {}


def shared(
    function: str, count: int | None = None, memory_gib: float | None = None, module: str | None = None
) -> Workers:
    """The workers of this process for a function: the same ones for the same arguments, ended with the process.

    Example:
        >>> shared("math:factorial").map([5], seconds=1.0)
        [120]
    """
    return _shared.setdefault((function, count, memory_gib, module), Workers(function, count, memory_gib, module))


@atexit.register
def close_shared() -> None:
    """End all shared workers now; they start again when they are needed."""
    for workers in _shared.values():
        workers.close()


def default_count() -> int:
    """One worker for each core that this process may use, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, cores)


class _Worker:
    """The owner's end of one supervisor: a process, two pipes, and when the answer must be there."""

    def __init__(self, function: str, memory_gib: float | None, module: str | None) -> None:
        path = [entry or os.getcwd() for entry in sys.path]
        given = {"path": path, "function": function, "memory_gib": memory_gib, "module": module}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One order of sets in every run, and one thread a worker.
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.answers, False)
        self.deadline = 0.0
        self._read = b""

    def send(self, item: Any, seconds: float) -> None:
        """Ask for one value; a supervisor that is gone shows when the answer is awaited."""
        self.deadline = time.monotonic() + PATIENCE * seconds + STARTING
        line = json.dumps({"seconds": seconds, "item": item}).encode() + b"\n"
        with suppress(BrokenPipeError):
            while line:
                line = line[os.write(self.requests, line) :]

    def answer(self) -> dict[str, Any] | None:
        """The answer if it is there; "lost" if there will be none."""
        try:
            while not self._read.endswith(b"\n"):
                block = os.read(self.answers, 1 << 16)
                if not block:
                    return {"failure": "lost"}
                self._read += block
        except BlockingIOError:
            return {"failure": "lost"} if time.monotonic() > self.deadline else None
        line, self._read = self._read, b""
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> int:
        """End the supervisor and its child, which are a process group; the supervisor's exit status."""
        with suppress(ProcessLookupError):  # nobody has waited for it yet, so the number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.release()
        return self.process.wait()

    def release(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
