"""Calls functions in worker processes, with limits of time and memory for each call.

It is for functions that may hang (a computer algebra system on a model's text, an environment) or are slow (a judge, a
metric). A worker is two processes: a supervisor, which imports the function once, and a child forked from it, which
calls the function. The owner is the process that has the pool.

* Start: a supervisor is a fresh interpreter, not a fork of the owner, since torch's threads do not survive a fork. It
  imports neither torch nor the owner's main script. The pipes carry JSON.
* Time limit: the supervisor watches the time of each call. Importing is not part of a call, so the first call has the
  same limit. The owner has a deadline too, for a supervisor that does not answer at all.
* End: when its pipe closes, because the owner closes it or dies, a supervisor kills its child and all processes that
  the child has started, and exits. A call that takes too long, raises or crashes loses its own answer and one child;
  the next call gets a new child, forked from the supervisor, without any state of the old one."""

import atexit
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Literal

from lmgym.core.cores import cores
from lmgym.core.errors import LmgymError
from lmgym.core.output import open_standard_files
from lmgym.processes.supervisor import CLOSED, ENDING, LONGEST_WAIT, PROGRESS, READY, RENEW, STARTUP_SECONDS

MAX_PROCESSES = 8  # unless a pool is told otherwise
MAX_STARTUP_FAILURES = 5  # in a row, after which the pool gives up
MAX_LOSSES = 3  # workers that an item may lose before it counts as the cause
GRACE = 6.0  # seconds that a supervisor gets, beyond the limit of a call, to say that it was exceeded
PATIENCE = 10  # limit by the clock / limit of processor time, in `map`: a call may sleep or share its core
BOOT = """import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from lmgym.processes.supervisor import supervise
supervise(**given)
"""


@dataclass(frozen=True)
class Failure:
    """The reason why a call has no value: a time limit, a crash of its process, or an exception. In a reply, `position`
    is that of the failed item, and "lost" means that the whole worker has ended.

    Example: Failure("time", "took too much processor time")"""

    kind: Literal["time", "crash", "error", "lost"]
    message: str
    position: int = field(default=0, repr=False, compare=False)


Reply = list[Any] | Failure  # a value for each item of a request; after a failure none


@dataclass(eq=False)
class ProcessPool:
    """Up to `count` worker processes (by default one a core, 8 at most) for `function`, a "module:name".

    The function takes one JSON value and returns one. If it has an attribute `prepare`, each supervisor calls
    `prepare(*setup)` once before any child is forked, to load what all calls need. `memory_gib` limits the address
    space of a child (Linux). Workers start when they are needed and serve later calls too. They end with `close`, or
    when the owner ends or is killed; Ctrl-C in the terminal does not reach them.

    Example:
        >>> with ProcessPool("math:factorial") as pool:
        ...     pool.map([5, -1], seconds=1.0)
        [120, Failure(kind='error', message='ValueError: factorial() not defined for negative values')]
    """

    function: str
    count: int | None = None
    memory_gib: float | None = None
    setup: tuple[Any, ...] = ()
    failures: Counter[str] = field(default_factory=Counter)  # of all calls so far, by kind
    _processes: list["WorkerProcess"] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _lost: int = field(default=0, repr=False)  # workers in a row that ended before they could begin

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise LmgymError(f"worker processes for '{self.function}': there must be at least 1, not {self.count}")
        atexit.register(self.close, ENDING)
        os.register_at_fork(after_in_child=self._forget)

    def map(self, items: Sequence[Any], seconds: float, by_clock: bool = False) -> list[Any]:
        """The function's value for each item, in order, or a Failure.

        Each call may take `seconds` of processor time, so that a busy machine fails no call, and ten times as long by
        the clock; with `by_clock`, `seconds` by the clock. An item whose worker was killed from outside is tried again,
        MAX_LOSSES times. Raises LmgymError if the function cannot be imported or prepared."""
        if not 0 < seconds < math.inf:
            raise LmgymError(f"a call in a worker process needs a limit above 0 seconds, not {seconds}")
        with self._lock:
            try:
                return self._map(list(items), seconds, by_clock)
            except BaseException:  # for example a signal: the next call must not get the reply to this one
                self._end()
                raise

    def start_early(self) -> None:
        """Start a worker now, without waiting for it, if there is none."""
        with self._lock:
            if not self._processes:
                self.start()

    def renew(self) -> None:
        """Forget what earlier calls have left behind: each worker forks a fresh process for its next call."""
        with self._lock:
            for process in self._processes:
                process.renew()

    def start(self) -> "WorkerProcess":
        """Start one more worker, for a caller that sends it requests and reads the replies with `wait`."""
        if self._lost >= MAX_STARTUP_FAILURES:
            self._lost = 0
            raise LmgymError(
                f"worker processes for '{self.function}' die as soon as they start; what they print on standard error "
                "says why"
            )
        self._processes.append(process := WorkerProcess(self.function, self.setup, self.memory_gib))
        return process

    def wait(self, busy: Collection["WorkerProcess"]) -> list[tuple["WorkerProcess", Reply]]:
        """Wait until something is heard of the busy workers, and return those that have replied or are lost, with their
        replies. Raises LmgymError if the function cannot be imported or prepared."""
        left = min(process.deadline for process in busy) - time.monotonic()
        ready = connection.wait([process.pipe for process in busy], min(max(left, 0.0), LONGEST_WAIT))
        replies = []
        for process in busy:
            late = process.pipe not in ready
            if late and time.monotonic() < process.deadline:
                continue
            reply = process.give_up() if late else process.reply()
            if reply is None:
                continue
            replies.append((process, reply))
            lost = isinstance(reply, Failure) and reply.kind == "lost"
            self._lost = self._lost + 1 if lost and not process.began else 0
            if lost or late:
                self._processes.remove(process)
        return replies

    def close(self, seconds: float = -1.0) -> None:
        """End the worker processes; the next `map` starts new ones. Not if others map for `seconds` more."""
        if self._lock.acquire(timeout=seconds):
            try:
                self._end()
            finally:
                self._lock.release()

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map(self, items: list[Any], seconds: float, by_clock: bool) -> list[Any]:
        results: list[Any] = [None] * len(items)
        waiting, losses = deque(range(len(items))), Counter[int]()
        most, busy = self.count or default_count(), dict["WorkerProcess", int]()
        while waiting or busy:
            # Each worker gets one item at a time, so a slow item delays no others.
            idle = [process for process in self._processes if process not in busy]
            while waiting and len(busy) < most:
                process = idle.pop() if idle else self.start()
                busy[process] = waiting.popleft()
                limits = (seconds, 0.0) if by_clock else (PATIENCE * seconds, seconds)
                process.send([items[busy[process]]], *limits)
            # A lost worker was killed from outside, so its item gets another chance.
            for process, reply in self.wait(busy):
                index = busy.pop(process)
                if isinstance(reply, list):
                    results[index] = reply[0]
                elif reply.kind == "lost" and losses[index] < MAX_LOSSES:
                    losses[index] += process.began  # a worker that never began has lost nothing by its item
                    waiting.appendleft(index)
                else:
                    results[index] = Failure("crash" if reply.kind == "lost" else reply.kind, reply.message)
                    self.failures[results[index].kind] += 1
        return results

    def _end(self) -> None:
        for process in self._processes:  # close all pipes first, so that all end at the same time
            process.pipe.close()
        while self._processes:
            self._processes.pop().end()

    def _forget(self) -> None:
        """In a fork of the owner, close its copies of the pipes: a worker must notice when the owner's close."""
        for process in self._processes:
            process.pipe.close()
        self._processes, self._lock = [], threading.Lock()


class WorkerProcess:
    """One worker, seen from the owner: the supervisor's process, the pipe to it, and the deadline of its reply."""

    def __init__(self, function: str, setup: Sequence[Any], memory_gib: float | None) -> None:
        open_standard_files()  # a program that has closed them may train, too
        self.pipe, far_end = connection.Pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        with far_end, tempfile.TemporaryFile() as progress:
            progress.truncate(PROGRESS)
            self._progress: memoryview[float] = memoryview(mmap.mmap(progress.fileno(), PROGRESS)).cast("d")
            given = {"function": function, "setup": setup, "memory_gib": memory_gib}
            given |= {"pipe": far_end.fileno(), "progress": progress.fileno()}
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps({"path": path, **given})],
                stdin=subprocess.DEVNULL,
                # The same order of sets in every run, and one thread in each worker.
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                pass_fds=(far_end.fileno(), progress.fileno()),
            )
        self._sent, self._seconds, self._requests = 0.0, 0.0, 0
        self.began = False  # True once it has imported the function

    @property
    def deadline(self) -> float:
        """When, by `time.monotonic`, to give up a supervisor that does not report that a call took too long."""
        began = max(self._sent, self._progress[1]) + (0.0 if self.began else STARTUP_SECONDS)
        return began + self._seconds + GRACE

    def send(self, items: Sequence[Any], seconds: float, processor_seconds: float = 0.0) -> None:
        """Request the values of some items. Each may take `seconds` by the clock and `processor_seconds` of processor
        time (0: no limit)."""
        # The supervisor enforces the limits. The deadline is for a supervisor that does not reply at all.
        self._sent, self._seconds = time.monotonic(), seconds
        self._progress[0] = self._progress[1] = 0.0
        # The supervisor reads no more than the first line.
        self._requests += 1
        request = f"{seconds} {self._requests}\n{json.dumps({'processor_seconds': processor_seconds, 'items': items})}"
        with suppress(OSError):  # if the supervisor is gone, reading its reply will notice it
            self.pipe.send_bytes(request.encode())

    def renew(self) -> None:
        """Let the next request be answered by a fresh process. No request may be in flight."""
        with suppress(OSError):  # as in `send`
            self.pipe.send_bytes(RENEW)

    def reply(self) -> Reply | None:
        """Read the reply; None if the supervisor only says that it can begin. Raises LmgymError if the function cannot
        be imported or prepared."""
        try:
            answer = json.loads(self.pipe.recv_bytes())
        except CLOSED:
            return Failure("lost", f"its worker ended with status {self.end()}", int(self._progress[0]))
        if answer == READY:
            self.began, self._sent = True, time.monotonic()
            return None
        if isinstance(answer, dict) and answer["kind"] == "start":
            raise LmgymError(answer["message"])
        return answer if isinstance(answer, list) else Failure(**answer)

    def give_up(self) -> Failure:
        """End a worker whose deadline is over."""
        return Failure("time", f"its worker did not answer (status {self.end()})", int(self._progress[0]))

    def end(self) -> int:
        """Close the pipe, so that the supervisor ends its child and itself; if it does not, kill it. Returns its exit
        status."""
        self.pipe.close()
        self.process.send_signal(signal.SIGCONT)  # a call may have stopped it
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(2 * ENDING)
        self.process.kill()
        return self.process.wait()


_shared: dict[tuple[str, int | None, float | None, tuple[Any, ...]], ProcessPool] = {}


def shared(
    function: str, count: int | None = None, memory_gib: float | None = None, setup: tuple[Any, ...] = ()
) -> ProcessPool:
    """The pool of this process for a function: the same pool for the same arguments. It ends with the process."""
    key = (function, count, memory_gib, setup)
    return _shared.get(key) or _shared.setdefault(key, ProcessPool(*key))


def close_shared() -> None:
    """End the processes of all shared pools now; they start again when they are needed."""
    for pool in _shared.values():
        pool.close()


def default_count() -> int:
    """One worker for each core that this process may use, 8 at most."""
    return min(MAX_PROCESSES, cores())
