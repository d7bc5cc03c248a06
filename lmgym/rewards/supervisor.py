"""The other side of workers.py: a fresh process that imports a function, and the child forked from it that calls it.

It imports nothing that it does not need, since each worker starts with it.
"""

import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 10  # times its limit of processor time that a call may take by the clock: it may sleep, or share its core


def resolve(function: str) -> Callable[[Any], Any]:
    """The function that "module:name" points to."""
    module, _, name = function.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


def supervise(function: str, memory_gib: float | None, module: str | None = None) -> None:
    """What a supervisor does until its input ends: read a request, let a child answer it, replace the child after a
    failure. `module` is imported at once, so that no child's time goes into that."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are meant for the owner, whose end is ours
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what the function prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        call = resolve(function)
        if module is not None:
            importlib.import_module(module)
        getattr(call, "prepare", lambda: None)()
    except BaseException as error:
        os.write(answers, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    child = None
    with os.fdopen(requests, "rb", closefd=False) as lines, os.fdopen(answers, "wb", closefd=False) as out:
        while line := lines.readline():
            child = child or _Child(call, memory_gib, (requests, answers))
            answer = child.ask(line, requests)
            if answer is None:
                break
            if answer.startswith(b'{"failure"'):
                child.kill()
                child = None
            out.write(answer)
            out.flush()
    if child:
        child.kill()


class _Child:
    """The supervisor's end of the process that calls the function."""

    def __init__(self, call: Callable[[Any], Any], memory_gib: float | None, not_its_own: Sequence[int]) -> None:
        read, self.requests = os.pipe()
        answers, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                for number in (self.requests, answers, *not_its_own):
                    os.close(number)
                _serve(call, memory_gib, read, write)
            finally:
                os._exit(0)
        os.close(read)
        os.close(write)
        self.answers = os.fdopen(answers, "rb")

    def ask(self, line: bytes, owner: int) -> bytes | None:
        """The child's line for a request, or one that says how it failed; None if the owner is gone."""
        patience = PATIENCE * json.loads(line)["seconds"]
        try:
            while line:
                line = line[os.write(self.requests, line) :]
        except BrokenPipeError:
            return self._crashed()
        ready, _, _ = select.select([self.answers.fileno(), owner], [], [], patience)
        if owner in ready:  # it says nothing before it has its answer, so this is the end of the file
            return None
        if not ready:
            return _failure("time", f"did not return within {patience:g} s")
        answer = self.answers.readline()
        return answer if answer.endswith(b"\n") else self._crashed()

    def _crashed(self) -> bytes:
        self.process, status = 0, os.waitpid(self.process, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGPROF:
            return _failure("time", "took too much processor time")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return _failure("crash", f"its process was {how}" if code < 0 else f"its process {how}")

    def kill(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.requests)
        self.answers.close()


def _serve(call: Callable[[Any], Any], memory_gib: float | None, read: int, write: int) -> None:
    """What a child does, until its supervisor closes the pipe."""
    if memory_gib is not None and sys.platform == "linux":
        size = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with os.fdopen(read, "rb") as lines:
        while line := lines.readline():
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            # Should its supervisor be killed meanwhile, this ends it.
            signal.setitimer(signal.ITIMER_REAL, PATIENCE * request["seconds"] + 5.0)
            try:
                answer = json.dumps({"value": call(request["item"])}).encode() + b"\n"
            except BaseException as error:
                answer = _failure("error", f"{type(error).__name__}: {error}"[:500])
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            while answer:
                answer = answer[os.write(write, answer) :]


def _failure(kind: str, message: str) -> bytes:
    return json.dumps({"failure": kind, "message": message}).encode() + b"\n"
