"""Environments in processes of their own: each call has a time limit, and what hangs or crashes costs one episode.

A process that has to be ended takes all its environments with it. The others are built anew in a fresh one and their
actions are played again: an environment is a pure function of (example, seed, actions).
"""

import atexit
import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.vector import EnvFailure, Opening
from lmgym.envs.worker import COUNTER, read
from lmgym.types import Example

STARTING = 120.0  # seconds in which a process must have imported its environment
SPOILT = (
    "the environment was built anew beside one that failed, and did not answer its seed and actions as it had before"
)
BOOT = """import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from lmgym.envs.worker import serve
serve(given)
"""
Command = dict[str, Any]


@dataclass
class Workers:
    """`count` processes that hold environments of a recipe's `env:` section: its name, its arguments, and the plugins
    that the name may come from. Each call of an environment may take `seconds` by the clock.

    They start when they are needed and end with `close`, with the process that owns them, or when that is killed.

    Example:
        >>> envs = Workers("gymnasium", {"id": "Blackjack-v1", "agent": "blackjack"})
        >>> envs.begin([(0, Example("game/0", "game 0"), 7)])[0].prompt[-1]["content"]
        'You hold 10; the dealer shows 4.'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()
    count: int = 2
    seconds: float = 60.0
    _workers: list["_Worker | None"] = field(default_factory=list, repr=False)
    _past: dict[int, list[tuple[Command, Any]]] = field(default_factory=dict, repr=False)  # by place, with answers
    _spoilt: set[int] = field(default_factory=set, repr=False)  # places that went another way when played again

    def __post_init__(self) -> None:
        if self.count < 1:
            raise LmgymError(f"env.workers is {self.count}; it must be at least 1, or 0 for none")
        if not self.seconds > 0:
            raise LmgymError(f"env.seconds is {self.seconds}; it must be above 0")
        self._workers = [None] * self.count
        atexit.register(self.close)

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        for place, _, _ in items:
            self._past[place] = []
            self._spoilt.discard(place)
        return self._ask([{"do": "begin", "place": p, "example": _plain(e), "seed": seed} for p, e, seed in items])

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        return self._ask([{"do": "step", "place": p, "text": text, "stop": stop} for p, text, stop in items])

    def demonstrate(self, places: Sequence[int]) -> list[str | EnvFailure]:
        return self._ask([{"do": "demonstrate", "place": place} for place in places])

    def end(self, places: Sequence[int]) -> None:
        self._ask([{"do": "end", "place": place} for place in places if place in self._past])
        for place in places:
            self._past.pop(place, None)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for number, worker in enumerate(self._workers):
            if worker is not None:
                worker.kill()
                self._workers[number] = None
        self._past.clear()

    def _ask(self, commands: list[Command]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        share: dict[int, list[int]] = {}
        for place, command in enumerate(commands):
            share.setdefault(command["place"] % self.count, []).append(place)
        try:
            for number, own in share.items():
                self._send(number, [(place, commands[place]) for place in own])
            busy = set(share)
            while busy:
                for number in self._ready(busy):
                    self._hear(number, answers)
                    if not self._worker(number).unanswered:
                        busy.discard(number)
        except BaseException:  # what is on its way must not be taken for the next call's answer
            self.close()
            raise
        return answers

    def _send(self, number: int, commands: list[tuple[int | None, Command]]) -> None:
        """Commands with their places among the answers; those without one are played again."""
        if self._workers[number] is None:
            given = {"name": self.name, "arguments": dict(self.arguments), "plugins": list(self.plugins)}
            self._workers[number] = _Worker(given)
        self._worker(number).send(commands, self.seconds)

    def _ready(self, busy: set[int]) -> list[int]:
        """The workers that have said something, or whose time is up."""
        with selectors.DefaultSelector() as selector:
            for number in busy:
                selector.register(self._worker(number).output, selectors.EVENT_READ, number)
            patience = min(self._worker(number).deadline for number in busy) - time.monotonic()
            ready = [key.data for key, _ in selector.select(max(patience, 0.0))]
        now = time.monotonic()
        return ready + [n for n in busy if n not in ready and self._worker(n).deadline <= now]

    def _hear(self, number: int, answers: list[Any]) -> None:
        worker = self._worker(number)
        for (place, command), answer in worker.answers(self.seconds):
            if "refused" in answer:
                raise LmgymError(answer["refused"])
            self._note(place, command, answer, answers)
        if worker.lost:
            self._replace(number, answers)

    def _note(self, place: int | None, command: Command, answer: dict[str, Any], answers: list[Any]) -> None:
        past = self._past[command["place"]]
        if place is None:
            if (command, answer) not in past:
                self._spoilt.add(command["place"])
            return
        answers[place] = read(answer)
        if command["place"] in self._spoilt and command["do"] != "end":
            answers[place] = EnvFailure(SPOILT)
        elif command["do"] in ("begin", "step"):
            past.append((command, answer))

    def _replace(self, number: int, answers: list[Any]) -> None:
        """A fresh process for one that hung or crashed; its other environments are played again."""
        worker = self._worker(number)
        number_of_culprit = worker.culprit()
        place, culprit = worker.unanswered[number_of_culprit]
        others = [asked for n, asked in enumerate(worker.unanswered) if n != number_of_culprit]
        reason = worker.kill()
        self._workers[number] = None
        self._past[culprit["place"]] = []
        if place is not None:
            answers[place] = EnvFailure(reason)
        again: list[tuple[int | None, Command]] = []
        for own, past in self._past.items():
            if own % self.count == number:
                again += [(None, command) for command, _ in past]
        again += [(p, command) for p, command in others if p is not None]
        if again:
            self._send(number, again)

    def _worker(self, number: int) -> "_Worker":
        worker = self._workers[number]
        assert worker is not None
        return worker


class _Worker:
    """The owner's end of one process: two pipes, a counter of the commands that it has begun, and what is still to be
    answered."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        path = [entry or os.getcwd() for entry in sys.path]
        with tempfile.TemporaryFile() as file:
            file.truncate(COUNTER)
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps({**given, "path": path, "counter": file.fileno()})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                pass_fds=(file.fileno(),),
            )
            self.counter = memoryview(mmap.mmap(file.fileno(), COUNTER)).cast("Q")
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.unanswered: list[tuple[int | None, Command]] = []
        self.answered, self.begun = 0, 0  # commands in all
        self.ended, self.lost, self.seconds = False, False, 0.0
        self.deadline, self._read = 0.0, b""

    def send(self, commands: list[tuple[int | None, Command]], seconds: float) -> None:
        self.unanswered, self.seconds = list(commands), seconds
        self.deadline = time.monotonic() + seconds + (0.0 if self.begun else STARTING)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it shows when the answer is awaited
            self.process.stdin.write(json.dumps([command for _, command in commands]).encode() + b"\n")
            self.process.stdin.flush()

    def answers(self, seconds: float) -> list[tuple[tuple[int | None, Command], dict[str, Any]]]:
        """What has been answered since the last time, each with its command; `lost` where no more will come."""
        try:
            while block := os.read(self.output, 1 << 16):
                self._read += block
            self.ended = True
        except BlockingIOError:
            pass
        *lines, self._read = self._read.split(b"\n")
        heard = [(command, json.loads(line)) for command, line in zip(self.unanswered, lines, strict=False)]
        del self.unanswered[: len(heard)]
        self.answered += len(heard)
        now = time.monotonic()
        if self.counter[0] != self.begun:  # another command since the last look
            self.begun, self.deadline = self.counter[0], now + seconds
        self.lost = bool(self.unanswered) and (self.ended or now >= self.deadline)
        return heard

    def culprit(self) -> int:
        """The place, among what is unanswered, of the command that it was at."""
        return min(max(self.counter[0] - self.answered - 1, 0), len(self.unanswered) - 1)

    def kill(self) -> str:
        """End the process and what it has started; why it had to be."""
        status = self.process.poll()
        if self.ended and status is None:  # its pipe is closed, so its end is near
            with suppress(subprocess.TimeoutExpired):
                status = self.process.wait(1.0)
        with suppress(ProcessLookupError):  # nobody has waited for it yet, so the number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()
        if status is None and not self.counter[0]:
            return f"its process did not start within {STARTING:g} s"
        if status is None:
            return f"the environment did not answer within {self.seconds:g} s"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the environment's process {how}"


def _plain(example: Example) -> dict[str, Any]:
    """An example as JSON can hold it."""
    tree = {
        "id": example.id,
        "prompt": example.prompt if isinstance(example.prompt, str) else [dict(message) for message in example.prompt],
        "references": list(example.references),
        "meta": dict(example.meta),
    }
    try:
        json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"example {example.id} cannot be sent to an environment's process ({error}); let its task keep plain texts "
            "and numbers in meta, or write env.workers: 0"
        ) from error
    return tree
