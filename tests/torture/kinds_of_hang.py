"""More than 20 ways never to return, as rewards and as an environment. It imports little: workers import it."""

import ctypes
import fcntl
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example

LONG = 100_000  # seconds


def sleep() -> None:
    time.sleep(LONG)


def loop() -> None:
    while True:
        pass


def swallow() -> None:
    """Catches everything, and goes on."""
    while True:
        try:
            time.sleep(LONG)
        except BaseException:
            continue


def ignore() -> None:
    """Ignores every signal that it may ignore, over and over."""
    while True:
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                continue
        time.sleep(0.01)


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(LONG)


def disarm() -> None:
    """Stops the alarms before they ring."""
    while True:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
            signal.setitimer(timer, 0.0)


def power() -> None:
    """One long call in C."""
    7 ** (7**11)


def iterate() -> None:
    """A loop in C, which calls no signal handler."""
    sum(itertools.repeat(0))


def backtrack() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def library() -> None:
    """Sleeps in the C library, with Python's lock held, so that no other thread of the process runs either."""
    ctypes.PyDLL(None).sleep(LONG)


def lock() -> None:
    own = threading.Lock()
    own.acquire()
    own.acquire()


def thread() -> None:
    """Waits for a thread that never ends, and that the interpreter waits for at its end."""
    waited_for = threading.Thread(target=sleep)
    waited_for.start()
    waited_for.join()


def child() -> None:
    """Waits for a process."""
    subprocess.run(["sleep", str(LONG)])


def detached() -> None:
    """Has started a process with a session of its own, whose parent is gone."""
    script = f"import subprocess; subprocess.Popen(['sleep', '{LONG}'])"
    subprocess.run([sys.executable, "-c", script], start_new_session=True)
    time.sleep(LONG)


def fork() -> None:
    """Two processes instead of one, and both hang."""
    os.fork()
    time.sleep(LONG)


def pipe() -> None:
    os.read(os.pipe()[0], 1)


def fifo() -> None:
    """Opens a pipe to which nobody writes."""
    path = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(path)
    try:
        path.read_bytes()
    finally:
        path.unlink()


def connect() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.accept()


def poll() -> None:
    select.select([], [], [])


def pause() -> None:
    while True:
        signal.pause()


def file_lock() -> None:
    with tempfile.NamedTemporaryFile() as file, open(file.name) as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)


def destructor() -> None:
    """Hangs where exceptions are lost."""

    class Last:
        def __del__(self) -> None:
            loop()

    Last()


def recurse() -> None:
    """Runs out of stack, over and over."""

    def deeper() -> None:
        deeper()

    while True:
        try:
            deeper()
        except RecursionError:
            continue


def stop() -> None:
    """Stops its process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONG)


def stop_parent() -> None:
    """Stops the process that watches it."""
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(LONG)


def close() -> None:
    """Closes every file, the pipe to its parent, too."""
    os.closerange(0, 1000)
    time.sleep(LONG)


KINDS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        sleep, loop, swallow, ignore, block, disarm, power, iterate, backtrack, library, lock, thread, child, detached,
        fork, pipe, fifo, connect, poll, pause, file_lock, destructor, recurse, stop, stop_parent, close,
    )
}  # fmt: skip


def hangs(texts: list[str], examples: list[Example], *, kind: str) -> list[float]:
    """A reward that hangs on the text "hang"."""
    for text in texts:
        if text == "hang":
            KINDS[kind]()
    return [float(len(text)) for text in texts]


def hang_row(kind: str) -> str:
    """What a pool of processes is given to call."""
    if kind in KINDS:
        KINDS[kind]()
    return kind


@register("env", "hanging")
class Hanging:
    """Hangs in the call that the example's id names, as its prompt says."""

    def reset(self, example: Example, seed: int) -> str:
        self.example = example
        return self._call("reset", "go")

    def step(self, text: str, stop: str) -> Step:
        return Step(terminated=True, reward=float(len(self._call("step", text))))

    def demonstrate(self) -> str:
        return self._call("demonstrate", "go")

    def close(self) -> None:
        self._call("close", "")

    def _call(self, name: str, answer: str) -> str:
        if self.example.id == name:
            KINDS[str(self.example.prompt)]()
        return answer


def drips(kind: str) -> Iterator[bytes]:
    """What a server sends, a piece every tenth of a second: nothing, or a head or a body without an end."""
    if kind == "silent":
        while True:
            yield b""
    if kind == "head":
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            yield b"X: y\r\n"
    if kind == "status":
        while True:
            yield b"H"
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\n \r\n" if kind == "chunks" else b"1"
