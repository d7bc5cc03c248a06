"""Environments in worker processes: each call has a time limit, and a call that hangs or crashes costs one episode.

It ends its process, and with it the other environments there. These are built again in a new process, and their actions
are replayed: an environment is a pure function of (example, seed, actions)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.env_worker import from_json
from lmgym.envs.vector import EnvFailure, Opening
from lmgym.pictures.store import current_store
from lmgym.processes.pool import Failure, ProcessPool, Reply, WorkerProcess
from lmgym.types import Example

REPLAY_MISMATCH = (
    "another environment of its process failed; rebuilt, it did not answer its seed and actions as it had before"
)
Command = dict[str, Any]
Asked = list[tuple[int | None, Command]]  # commands, each with the position of its answer; None: it is replayed


@dataclass(eq=False)
class EnvProcesses:
    """`count` processes that hold the environments of a recipe's `env:` section: its name, its arguments, and the
    plugins that may define the name. Each call of an environment (building it, too) may take `seconds` by the clock.

    The processes start with the first call. They end with `close`, or when the process that owns them ends.

    Example:
        >>> envs = EnvProcesses("gymnasium", {"id": "Blackjack-v1", "agent": "blackjack"})
        >>> envs.begin([(0, Example("game/0", "game 0"), 7)])[0].prompt[-1]["content"]
        'You hold 10; the dealer shows 4.'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()
    count: int = 2
    seconds: float = 60.0
    spent: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _pool: ProcessPool = field(init=False, repr=False)
    _slots: dict[int, WorkerProcess] = field(default_factory=dict, repr=False)  # environment i lives in i % count
    _history: dict[int, list[tuple[Command, str]]] = field(default_factory=dict, repr=False)  # with answers, by index
    _mismatched: set[int] = field(default_factory=set, repr=False)  # indices whose answers differed in a replay

    def __post_init__(self) -> None:
        if self.count < 1:
            raise LmgymError(f"env.workers is {self.count}; it must be at least 1, or 0 for none")
        if not self.seconds > 0:
            raise LmgymError(f"env.seconds is {self.seconds}; it must be above 0")
        setup = (self.name, dict(self.arguments), list(self.plugins), str(current_store().folder))
        self._pool = ProcessPool("lmgym.envs.env_worker:run_command", self.count, setup=setup)

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        for index, _, _ in items:
            self._history[index] = []
            self._mismatched.discard(index)
        return self._ask(
            [{"do": "begin", "index": i, "example": _example_json(e), "seed": seed} for i, e, seed in items]
        )

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        return self._ask([{"do": "step", "index": i, "text": text, "stop": stop} for i, text, stop in items])

    def demonstrate(self, indices: Sequence[int]) -> list[str | EnvFailure]:
        return self._ask([{"do": "demonstrate", "index": index} for index in indices])

    def end(self, indices: Sequence[int]) -> None:
        self._ask([{"do": "end", "index": index} for index in indices if self._history.get(index)])
        for index in indices:
            self._history.pop(index, None)
            self.spent.pop(index, None)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        self._pool.close()
        self._history.clear()

    def _ask(self, commands: list[Command]) -> list[Any]:
        """The answers to some commands, in their order."""
        answers: list[Any] = [None] * len(commands)
        shares: dict[int, Asked] = {}
        # Environment i always lives in process i % count.
        for position, command in enumerate(commands):
            shares.setdefault(command["index"] % self.count, []).append((position, command))
        busy: dict[WorkerProcess, tuple[int, Asked]] = {}
        try:
            # Each process gets its share at once. After a failure it is asked again for what it has not answered.
            while shares or busy:
                for slot, asked in shares.items():
                    busy[self._send(slot, asked)] = slot, asked
                shares = {}
                for process, reply in self._pool.wait(busy):
                    slot, asked = busy.pop(process)
                    if rest := self._take(slot, asked, reply, answers):
                        shares[slot] = rest
        except BaseException:  # a reply on its way must not be taken for the next call's
            self.close()
            raise
        return answers

    def _send(self, slot: int, asked: Asked) -> WorkerProcess:
        if slot not in self._slots or self._slots[slot].pipe.closed:
            self._slots[slot] = self._pool.start()
        self._slots[slot].send([command for _, command in asked], self.seconds)
        return self._slots[slot]

    def _take(self, slot: int, asked: Asked, reply: Reply, answers: list[Any]) -> Asked:
        """Store the answers of a process. Returns what to ask it next: nothing, or after a failure all the rest."""
        if isinstance(reply, list):
            for (position, command), (text, seconds) in zip(asked, reply, strict=True):
                self._note(position, command, text, answers)
                if position is not None:
                    self.spent[command["index"]] = seconds
            return []
        # The environment that failed loses its episode.
        position, command = asked[reply.position]
        self._history[command["index"]] = []
        if position is None:
            self._mismatched.add(command["index"])
        else:
            answers[position] = EnvFailure(self._reason(reply))
        # The others go on in a new process: replay their past, then ask what has no answer yet.
        past = [entry for index, entries in self._history.items() if index % self.count == slot for entry in entries]
        rest = [one for n, one in enumerate(asked) if n != reply.position and one[0] is not None]
        return [*((None, old) for old, _ in past), *rest] if rest or past else []

    def _note(self, position: int | None, command: Command, text: str, answers: list[Any]) -> None:
        index = command["index"]
        # A replayed command must give the same answer as before.
        if position is None:
            if (command, text) not in self._history[index]:
                self._mismatched.add(index)
            return
        answers[position] = from_json(json.loads(text))
        if index in self._mismatched and command["do"] != "end":
            answers[position] = EnvFailure(REPLAY_MISMATCH)
        elif command["do"] in ("begin", "step"):
            self._history[index].append((command, text))

    def _reason(self, failure: Failure) -> str:
        if failure.kind == "time":
            return f"the environment did not answer within {self.seconds:g} s"
        return re.sub("^its ", "the environment's ", failure.message)


def _example_json(example: Example) -> dict[str, Any]:
    """An example as values that JSON can hold."""
    try:
        return example.to_json()
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"example {example.id} cannot be sent to an environment's process ({error}); let its task keep plain texts "
            "and numbers in meta, or write env.workers: 0"
        ) from error
