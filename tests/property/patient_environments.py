"""Environments that wait, for test_placement.py; the module imports no library of models."""

import asyncio
import os
from collections.abc import Sequence
from typing import ClassVar

from lmgym import Example, Step


class Waiting:
    """Two turns; each answer says in which process it was given."""

    needs_data = False

    def reset(self, example: Example, seed: int) -> str:
        self.turns = 0
        return f"{example.id}?"

    def step(self, text: str, stop: str) -> Step:
        return self.answered(text)

    def answered(self, text: str) -> Step:
        self.turns += 1
        info = {"process": float(os.getpid())}
        if self.turns == 2:
            return Step(reward=1.0, terminated=True, info=info)
        return Step([{"role": "user", "content": f"you said {text}"}], info=info)


class WaitingTogether(Waiting):
    async def step(self, text: str, stop: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(3600 if text == "hang" else 0)
        return self.answered(text)


class Batched(Waiting):
    """Answers many at once."""

    calls: ClassVar[list[int]] = []

    @classmethod
    def step_batch(cls, envs: Sequence["Batched"], texts: Sequence[str], stops: Sequence[str]) -> list[Step]:
        cls.calls.append(len(envs))
        if "fail" in texts:
            raise ValueError("the server is gone")
        return [env.answered(text) for env, text in zip(envs, texts, strict=True)]


class BatchedLater(Batched):
    @classmethod
    async def step_batch(  # type: ignore[override]
        cls, envs: Sequence["Batched"], texts: Sequence[str], stops: Sequence[str]
    ) -> list[Step]:
        await asyncio.sleep(0)
        return [env.answered(text) for env, text in zip(envs, texts, strict=True)]


def lookup(query: str) -> str:
    """Look something up.

    Args:
        query: what
    """
    return "found"


async def lookup_later(query: str) -> str:
    """Look something up.

    Args:
        query: what
    """
    return "found"
