"""The code that runs in the workers of pool.py: a supervisor imports a function; its child, a fork, calls it.

The supervisor makes no calls itself, so it can always kill a child that exceeds its time or whose owner has ended.
Every worker imports this module first, so it imports only what it needs."""

import ctypes
import glob
import json
import mmap
import os
import pkgutil
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from lmgym.core.errors import describe
from lmgym.core.output import HarmlessOutput

STARTUP_SECONDS = 120  # limit for a supervisor to import its function
LONGEST_WAIT = 3600.0  # seconds that one system call waits; for a longer limit it is repeated
ENDING = 1.0  # seconds that a process gets to end after its pipe is closed
PROGRESS = 16  # bytes: two floating-point numbers
READY = "ready"  # the first message to the owner: the function is imported
RENEW = b"renew"  # a request without a reply: the next one gets a fresh child
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
PR_SET_CHILD_SUBREAPER = 36  # descendants whose parent has died become children of this process, not of init
LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
CLOSED = (EOFError, OSError)  # what a pipe raises when the other side is gone
Call = Callable[[Any], Any]


def supervise(function: str, setup: Sequence[Any], memory_gib: float | None, pipe: int, progress: int) -> None:
    """Import and prepare a function; then let a child answer the requests, until the owner closes the pipe."""
    # Ctrl-C and a lost terminal are for the owner; this process ends with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what the function prints goes to standard error, and may get lost there
    sys.stdout = sys.stderr = HarmlessOutput(sys.stderr)  # type: ignore[assignment]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with Connection(pipe) as owner, suppress(*CLOSED):
        try:
            signal.alarm(STARTUP_SECONDS)  # if it takes longer, the alarm kills this process
            with _ending_with(owner):
                call = pkgutil.resolve_name(function)
                getattr(call, "prepare", lambda: None)(*setup)
            signal.alarm(0)
        except BaseException as error:
            return owner.send_bytes(
                _failure("start", f"worker processes for '{function}' cannot start: {describe(error)}")
            )
        owner.send_bytes(json.dumps(READY).encode())
        answer_requests(owner, call, memory_gib, memoryview(mmap.mmap(progress, PROGRESS)).cast("d"))


@contextmanager
def _ending_with(owner: Connection) -> Iterator[None]:
    """In the body, end this process and what it has started as soon as the owner's end of the pipe is closed."""
    stop, stopped = os.pipe()
    poll = select.poll()
    poll.register(owner.fileno(), select.POLLHUP)  # only that it was closed (0: macOS never tells); a request may wait
    poll.register(stop, select.POLLIN)

    def watch() -> None:
        if any(ready == owner.fileno() for ready, _ in poll.poll()):
            os.killpg(0, signal.SIGKILL)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:  # no other thread may run when a child is forked
        os.write(stopped, b".")
        watching.join()
        os.close(stop)
        os.close(stopped)


def answer_requests(owner: Connection, call: Call, memory_gib: float | None, progress: "memoryview[float]") -> None:
    """Send each request to a child and its reply to the owner. After a failure, and after RENEW, the next request gets
    a fresh child."""
    child = None
    try:
        while request := owner.recv_bytes():
            if request == RENEW:
                if child:
                    child.kill()
                child = None
                continue
            child = child or Child(call, memory_gib, owner, progress)
            if not (reply := child.ask(request, owner)):
                return
            if reply.startswith(b"{"):  # a failure: the child is gone
                child = None
            owner.send_bytes(reply)
    finally:
        if child:
            child.kill()


class Child:
    """The process that calls the function, seen from the supervisor.

    `progress` is memory that both share, and the owner too: the position of the present item, and its start time. So
    the answers to a request can be sent together, while each call has its own time limit."""

    def __init__(self, call: Call, memory_gib: float | None, owner: Connection, progress: "memoryview[float]") -> None:
        self.progress = progress
        self.pipe, far_end = Pipe()
        supervisor = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            try:
                owner.close()
                self.pipe.close()
                _confine(supervisor, memory_gib)
                _serve(call, self.progress, far_end)
            finally:
                os._exit(0)
        far_end.close()

    def ask(self, request: bytes, owner: Connection) -> bytes:
        """The reply to a request: a list of values, or a failure; after a failure the child is gone. Empty if the owner
        has ended."""
        limit, number = request[: request.index(b"\n")].split()
        seconds = float(limit)
        self.progress[0], self.progress[1] = 0, time.monotonic()
        try:
            self.pipe.send_bytes(request)
            ready: list[Any] = []
            while self.pipe not in ready:
                left = self.progress[1] + seconds - time.monotonic()
                ready = wait([self.pipe, owner], min(max(left, 0.0), LONGEST_WAIT))
                if owner in ready:  # the owner sends nothing before it has its reply, so it has closed the pipe
                    return b""
                if left <= 0 and not ready:
                    self.kill()
                    return _failure("time", f"did not return within {seconds:g} s", self.progress)
            said, _, reply = self.pipe.recv_bytes().partition(b"\n")
            if said != number:  # of a request before: the function has a way to answer twice
                self.kill()
                return _failure("error", "its process answered a request twice", self.progress)
        except CLOSED:
            return self._crashed(self.kill(ENDING))
        if reply.startswith(b"{"):  # an exception; the state of the child is unknown
            self.kill()
        return reply

    def kill(self, patience: float = 0.0) -> int:
        """Kill the child and all processes that it has started, after `patience` seconds to end by itself. Returns its
        exit code. (On systems other than Linux, a process that has left the child's group is not found.)"""
        self.pipe.close()
        until = time.monotonic() + patience
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
        with suppress(OSError):  # the group may be empty
            os.killpg(self.process, signal.SIGKILL)
        if not ended[0]:
            os.kill(self.process, signal.SIGKILL)
            ended = os.waitpid(self.process, 0)
        kill_orphans()
        return os.waitstatus_to_exitcode(ended[1])

    def _crashed(self, code: int) -> bytes:
        if code == -signal.SIGPROF:
            return _failure("time", "took too much processor time", self.progress)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return _failure("crash", f"its process {how}", self.progress)


def kill_orphans() -> None:
    """Kill what a child has left behind: all children of this process, which were its descendants, and theirs."""
    until = time.monotonic() + ENDING
    while (orphans := _children()) and time.monotonic() < until:
        for orphan in orphans:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _children() -> list[int]:
    """The children of this process that are still there, as Linux lists them; elsewhere none."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        # "NUMBER (NAME) STATE PARENT ..."; a name may have brackets, and is cut after 15 bytes, even within a character
        with suppress(OSError), open(stat, "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(stat.split("/")[2]))
    return found


def _confine(supervisor: int, memory_gib: float | None) -> None:
    """Set up the child: it leads a process group, dies with its supervisor, and has limited memory."""
    os.setpgid(0, 0)
    if sys.platform == "linux" and memory_gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30),) * 2)
    die_with(supervisor)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def die_with(owner: int) -> None:
    """In a new process, before it begins: on Linux it is killed when its parent `owner` has ended, even in the middle
    of a call.

    Example: subprocess.Popen(command, preexec_fn=partial(die_with, os.getpid()))"""
    if LIBRARY is not None:
        LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it ended before the call of prctl
        os._exit(1)


def _serve(call: Call, progress: "memoryview[float]", pipe: Connection) -> None:
    """Answer requests in the child, until the supervisor closes the pipe. A reply begins with its request's number."""
    process = os.getpid()
    while True:
        head, _, body = pipe.recv_bytes().partition(b"\n")
        request, values = json.loads(body), []
        try:
            for position, item in enumerate(request["items"]):
                progress[1], progress[0] = time.monotonic(), position
                signal.setitimer(signal.ITIMER_PROF, request["processor_seconds"])
                values.append(json.dumps(call(item)))
                if os.getpid() != process:  # the function has forked, and this is the child
                    os._exit(0)
            reply = f"[{', '.join(values)}]".encode()
        except BaseException as error:
            if os.getpid() != process:
                os._exit(1)
            reply = _failure("error", describe(error), progress)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        pipe.send_bytes(head.split()[1] + b"\n" + reply)


def _failure(kind: str, message: str, progress: "memoryview[float] | tuple[int]" = (0,)) -> bytes:
    """A reply that says what failed, and at which item."""
    return json.dumps({"kind": kind, "message": message, "position": int(progress[0])}).encode()
