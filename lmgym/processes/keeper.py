"""A program of the user's, with a keeper: a process that starts it in a new folder, and at the end kills all that it
has left behind and removes the folder. Further programs may follow it in its folder, such as one that grades its work.

The keeper ends when the program does, or when its owner closes the pipe to it or is gone, however that happened."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from lmgym.processes.supervisor import PR_SET_CHILD_SUBREAPER, die_with, kill_orphans

BOOT = """import os, sys
sys.path[:] = sys.argv[2].split(os.pathsep)
from lmgym.processes.keeper import keep
keep()
"""
AFTERWARDS = 60.0
NOT_STARTED = 127  # exit status, as a shell's


@dataclass(frozen=True)
class Outcome:
    """How a program has ended: its exit status, and the ends of its output and of its errors.

    Example: Outcome(0, '{"reward": 1.0}\\n', "")"""

    status: int
    output: str
    errors: str
    too_long: bool = False  # it was ended, since it wrote more than its limit


class Started(Protocol):
    """A program with its keeper, as its owner sees it: its output and its errors, and the exit status."""

    stdout: Any
    stderr: Any

    def wait(self) -> int: ...


Start = Callable[[int, Mapping[str, str], int], Started]
"""Starts a program and its keeper: from the keeper's end of the pipe to its owner, the variables, and the file that is
the program's standard input."""


class Program:
    """A program that runs: a command, or what a nursery's `start` calls (nursery.py). `ended` is called with its
    Outcome, in a thread, after all it had started is gone.

    At most `output` bytes are read of what it writes, the last `kept` of each kind are kept.

    Example: Program(["bash", "-c", "echo $A"], {"A": "1"}, b"{}", output=2**20, ended=outcomes.put)"""

    def __init__(
        self,
        command: Sequence[str] | Start,
        variables: Mapping[str, str],
        given: bytes,
        output: int,
        ended: Callable[[Outcome], None],
        kept: int = 2**16,
    ) -> None:
        start = command if callable(command) else partial(start_commands, [Command(tuple(command))])
        far_end, self._pipe = os.pipe()
        try:
            with tempfile.TemporaryFile() as standard_input:
                standard_input.write(given)
                standard_input.seek(0)
                self._process = start(far_end, variables, standard_input.fileno())
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(far_end)
        self._lock, self._left, self._ended = threading.Lock(), output, ended
        self._kept, self._tails = kept, (bytearray(), bytearray())
        threading.Thread(target=self._watch, name="program", daemon=True).start()

    def end(self) -> None:
        """Have the keeper kill the program, if it runs."""
        with self._lock:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1

    def wait(self) -> None:
        """Wait until the keeper is gone; call `end` before."""
        self._process.wait()

    def last_error_line(self) -> str:
        """What it has written last to its standard error, so far."""
        return bytes(self._tails[1]).decode(errors="replace").strip().rpartition("\n")[2]

    def _watch(self) -> None:
        other = threading.Thread(target=self._read, args=(self._process.stderr, self._tails[1]), daemon=True)
        other.start()
        self._read(self._process.stdout, self._tails[0])
        other.join()
        status = self._process.wait()
        self.end()
        output, errors = (bytes(tail).decode(errors="replace") for tail in self._tails)
        self._ended(Outcome(status, output, errors, self._left < 0))

    def _read(self, pipe: object, tail: bytearray) -> None:
        with pipe:  # type: ignore[attr-defined]
            while piece := os.read(pipe.fileno(), 2**16):  # type: ignore[attr-defined]
                tail += piece
                del tail[: -self._kept]
                with self._lock:
                    self._left -= len(piece)
                if self._left < 0:
                    self.end()


def started_with() -> str:
    """This process's path of imports, as one argument."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


@dataclass(frozen=True)
class Command:
    """A program with its arguments; what is run when it has ended or was killed, within AFTERWARDS seconds; and
    variables that it does not get.

    Example: Command(("docker", "run", "--name", "a", "python:3.12", "grade.py"), ("docker", "rm", "--force", "a"))"""

    words: tuple[str, ...]
    afterwards: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def start_commands(
    commands: Sequence[Command], far_end: int, variables: Mapping[str, str], standard_input: int
) -> Started:
    """Start a command with its keeper. If it ends with status 0, the next one follows in the same folder, when all that
    the one before has started is gone; each reads the standard input from its beginning.

    Example: Program(partial(start_commands, [Command(("python", "play.py")), Command(("python", "grade.py"))]), ...)"""
    steps = json.dumps([asdict(command) for command in commands])
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(far_end), started_with(), steps],
        env=dict(variables),
        stdin=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(far_end,),
    )


def keep() -> None:
    """The keeper of commands: its arguments are the pipe from its owner, the path of imports, and the commands
    (JSON)."""
    tend(int(sys.argv[1]), [partial(_Started, Command(**tree)) for tree in json.loads(sys.argv[3])])


class _Started:
    """A command that runs in this folder, as `tend` wants it."""

    def __init__(self, command: Command, folder: str) -> None:
        os.lseek(0, 0, os.SEEK_SET)
        variables = {name: value for name, value in os.environ.items() if name not in command.without}
        try:
            self._process = subprocess.Popen(
                command.words, cwd=folder, env=variables, start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # else it would outlive a keeper that was killed
            )  # fmt: skip
        except OSError as error:
            raise OSError(f"{command.words[0]} cannot be started: {error.strerror}") from None
        self.pid, self.kill, self.wait = self._process.pid, self._process.kill, self._process.wait
        self._afterwards = command.afterwards

    def clean(self) -> None:
        if self._afterwards:
            nothing = subprocess.DEVNULL
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._afterwards, stdin=nothing, stdout=nothing, stderr=nothing, timeout=AFTERWARDS)


class Tended(Protocol):
    """A program as its keeper sees it, which leads a session of its own."""

    pid: int

    def kill(self) -> None: ...
    def wait(self) -> int: ...
    def clean(self) -> None: ...


def tend(
    pipe: int, starts: Sequence[Callable[[str], Tended]], tell: Callable[[int], object] = lambda status: None
) -> NoReturn:
    """Start programs in a new folder, one after the other, until one fails or the owner has closed the pipe, which
    kills it. After each, kill all that it has left behind. At the end remove the folder, `tell` the exit status of the
    last one and exit with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(pipe, False)
    folder = tempfile.mkdtemp(prefix="lmgym-agent-")
    lock, running, closed = threading.Lock(), list[Tended](), threading.Event()

    def watch() -> None:
        os.read(pipe, 1)  # returns when the owner's end is closed
        with lock:
            closed.set()
            for program in running:
                program.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the programs would inherit it
    threading.Thread(target=watch, daemon=True).start()
    status = 0
    for start in starts:
        try:
            with lock:
                if closed.is_set():  # it counts as killed, also where none had started
                    status = -signal.SIGKILL
                    break
                running[:] = [start(folder)]
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            status = NOT_STARTED
            break
        status = running[0].wait()
        with suppress(ProcessLookupError, PermissionError):  # its group may be empty
            os.killpg(running[0].pid, signal.SIGKILL)
        kill_orphans()
        running[0].clean()
        if status:
            break
    shutil.rmtree(folder, ignore_errors=True)
    status = status if status >= 0 else 128 - status
    tell(status)
    os._exit(status)
