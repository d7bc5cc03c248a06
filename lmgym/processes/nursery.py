"""A function of the user's as a program: one process imports it once, and forks for each call, so that a call does not
pay for the imports. Each fork has a keeper of its own (keeper.py), and so a folder, an end, and no remains."""

import asyncio
import inspect
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from typing import Any, NoReturn

from lmgym.core.errors import LmgymError
from lmgym.core.registry import load_attribute
from lmgym.processes.keeper import Tended, started_with, tend
from lmgym.processes.supervisor import die_with

SIZE = struct.Struct("!Q")  # of a call's variables, as JSON, which follow
BOOT = """import os, sys
sys.path[:] = sys.argv[2].split(os.pathsep)
from lmgym.processes.nursery import serve
serve(int(sys.argv[1]), sys.argv[3])
"""


class Nursery:
    """Starts calls of a function, named as `module:function`; the module may lie in the current folder.

    The function gets the JSON of its standard input as its one argument, and may be `async`. What it returns is printed
    as the last line of its output: a mapping as JSON, and a number as {"reward": number}. Its module must start no
    thread while it is imported, since a fork has none of them.

    Example: Program(nursery.start, {"A": "1"}, b"{}", output=2**20, ended=outcomes.put)"""

    def __init__(self, function: str) -> None:
        self.function = function
        self._lock = threading.Lock()
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def start(self, far_end: int, variables: Mapping[str, str], standard_input: int) -> "Call":
        """Start a call, and its keeper, which ends it when the other end of the pipe `far_end` is closed."""
        pipes: list[tuple[int, int]] = []  # output, errors, exit status
        payload = json.dumps(dict(variables)).encode()
        try:
            while len(pipes) < 3:
                pipes.append(os.pipe())
            given = [standard_input, *(write for _, write in pipes), far_end]
            with self._lock:
                try:
                    self._send(payload, given)
                except OSError:  # it has ended, or was ended
                    self._close()
                    self._send(payload, given)
        except BaseException:
            for read, _ in pipes:
                os.close(read)
            raise
        finally:
            for _, write in pipes:
                os.close(write)
        return Call(*(read for read, _ in pipes))

    def close(self) -> None:
        """End the process; calls that run go on until their own end."""
        with self._lock:
            self._close()

    def _send(self, payload: bytes, given: list[int]) -> None:
        if self._process is not None and self._process[0].poll() is not None:
            self._close()
        if self._process is None:
            own, other = socket.socketpair()
            with other:
                command = [BOOT, str(other.fileno()), started_with(), self.function]
                nothing = subprocess.DEVNULL
                process = subprocess.Popen(
                    [sys.executable, "-c", *command], stdin=nothing, stdout=nothing, stderr=nothing,
                    env={"PYTHONHASHSEED": "0", **os.environ}, start_new_session=True, pass_fds=(other.fileno(),),
                )  # fmt: skip
            self._process = process, own
        socket.send_fds(self._process[1], [SIZE.pack(len(payload))], given)
        self._process[1].sendall(payload)

    def _close(self) -> None:
        if self._process is not None:
            process, own = self._process
            own.close()
            process.wait()
            self._process = None


class Call:
    """A call that runs: what it writes, and its exit status. Example: nursery.start(pipe, os.environ, stdin).wait()"""

    def __init__(self, output: int, errors: int, status: int) -> None:
        self.stdout, self.stderr, self._status = FileIO(output), FileIO(errors), FileIO(status)
        self._lock = threading.Lock()
        self._known: int | None = None

    def wait(self) -> int:
        """The exit status, once its keeper is gone."""
        with self._lock:
            if self._known is None:
                with self._status:
                    text = self._status.read()
                self._known = int(text) if text else -signal.SIGKILL  # the keeper itself was killed
            return self._known


def serve(pipe: int, name: str) -> NoReturn:
    """The nursery's process: import the function, and fork for each call until the owner is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the owner
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that end leave nothing behind
    function: Callable[[Any], Any] | None = None
    problem = ""
    try:
        function = load_attribute(name, "agent")
    except BaseException as error:
        problem = str(error) if isinstance(error, LmgymError) else traceback.format_exc()
    with socket.socket(fileno=pipe) as owner:
        while True:
            data, given, _, _ = socket.recv_fds(owner, SIZE.size, 5)
            while 0 < len(data) < SIZE.size:
                data += owner.recv(SIZE.size - len(data))
            if not data:
                os._exit(0)
            [size] = SIZE.unpack(data)
            payload = b""
            while len(payload) < size and (piece := owner.recv(size - len(payload))):
                payload += piece
            if os.fork() == 0:
                owner.close()
                _keep(given, json.loads(payload), function, problem)
            for one in given:
                os.close(one)


def _keep(given: list[int], variables: Mapping[str, str], function: Any, problem: str) -> NoReturn:
    """The keeper of a call."""
    *standard, status, far_end = given
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(standard[2], 2)

    def start(folder: str) -> Tended:
        keeper, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with(keeper)
            _run(standard, (status, far_end), folder, variables, function, problem)
        return _Fork(pid)

    tend(far_end, [start], tell=lambda ended: os.write(status, str(ended).encode()))


class _Fork:
    """A forked process as `tend` wants it."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False

    def kill(self) -> None:
        if not self._ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended = True
        return status

    def clean(self) -> None:
        """There is nothing to clean."""


def _run(
    standard: list[int], others: tuple[int, ...], folder: str, variables: Mapping[str, str], function: Any, problem: str
) -> NoReturn:
    """The call itself, in a process of its own."""
    status = 1
    try:
        # 1. As a program that was started: its session, signals, folder, streams and variables.
        os.setsid()
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_DFL)
        os.chdir(folder)
        for number, one in enumerate(standard):
            os.dup2(one, number)
        for one in (*standard, *others):
            os.close(one)
        os.environ.clear()
        os.environ.update(variables)
        # 2. The call.
        if problem:
            print(problem, file=sys.stderr)
        else:
            with open(0, closefd=False) as given:
                result = function(json.load(given))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            if result is not None:
                print("\n" + json.dumps(dict(result) if isinstance(result, Mapping) else {"reward": float(result)}))
            status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


async def _awaited(result: Any) -> Any:
    return await result
