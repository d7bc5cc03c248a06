"""Environments that test_environments.py plays, here and in worker processes, which import this file and no torch."""

import math
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmgym.core import seeds
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example, Message


@register("env", "moody")
class Moody:
    """An environment of all kinds of answers: how long it lasts, what it says and what it pays, its seed decides."""

    stop = ("\n",)

    def __init__(self, turns: int = 6) -> None:
        self.most = turns

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        self.random, self.turns = seeds.generator(seed), 0
        self.length = int(self.random.integers(1, self.most + 1))
        return example.prompt if seed % 2 else [{"role": "user", "content": f"{example.prompt} {seed % 97}"}]

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        reward = float(self.random.normal()) + len(text) / 10
        if self.turns == self.length:
            return Step(reward=reward, terminated=bool(self.random.integers(2)), truncated=True)
        kind, word = self.random.integers(4), "".join(map(chr, self.random.integers(97, 110, 3)))
        if kind == 0 and stop != "eos":
            return Step(reward=reward, continuation=word if self.random.integers(2) else "", unfinished=True)
        if kind == 1:
            return Step([{"role": "user", "content": word}], reward, restart=True)
        return Step([{"role": "user", "content": word}], reward)

    def demonstrate(self) -> str:
        return f"demo {self.turns}" + ("\n" if self.turns % 2 else "")


@register("env", "failing")
class Failing:
    """Does what its example says, in the second turn."""

    def reset(self, example: Example, seed: int) -> str:
        if example.id == "reset":
            raise ValueError("no board")
        self.what, self.turns = example.id, 0
        return "go"

    def step(self, text: str, stop: str) -> Any:
        self.turns += 1
        if self.turns == 3:
            return Step(reward=1.0, terminated=True)
        if self.turns == 2:
            return self._fail()
        return Step([{"role": "user", "content": f"go on {self.turns}"}])

    def _fail(self) -> Any:
        if self.what == "raise":
            raise KeyError("lost")
        if self.what == "hang":
            time.sleep(1000)
        if self.what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.what == "nan":
            return Step(reward=math.nan, terminated=True)
        if self.what == "nothing":
            return None
        if self.what == "silent":
            return Step()
        return Step([{"role": "user", "content": "go on"}])


@register("env", "forgetful")
class Forgetful:
    """Not a function of its seed: it counts the processes that it has been in."""

    def reset(self, example: Example, seed: int) -> str:
        self.what, self.turns = example.id, 0
        return "steady" if self.what == "steady" else f"{os.getpid()}"

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        if self.what == "crash" and self.turns == 2:
            os._exit(3)
        over = self.turns == 4
        return Step([] if over else [{"role": "user", "content": "on"}], terminated=over)


@register("env", "arrays")
class Arrays:
    """All that it returns comes from arrays of numpy's; it lasts three turns, of two players."""

    players, first, learners = np.int64(2), np.int64(1), np.arange(2)

    def reset(self, example: Example, seed: int) -> str:
        self.what, self.board = example.id, np.zeros(3, bool)
        return "go"

    def step(self, text: str, stop: str) -> Step:
        self.board[np.argmin(self.board)] = True
        over, turn = self.board.all(), self.board.sum()
        notes = {"right": over, "turn": turn, "share": self.board.mean(dtype=np.float32), "board": self.board}
        flags: Any = {self.what: over if self.what in ("terminated", "truncated") else np.bool_(False)}
        if self.what not in ("terminated", "truncated"):
            flags["terminated"] = over
        others: Any = {np.int64(1): np.float32(0.5)} if over else {}
        player: Any = np.int64(turn % 2)
        return Step([{"role": "user", "content": "on"}], turn / 2, player=player, others=others, info=notes, **flags)
