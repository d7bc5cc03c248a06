"""Environments of two turns, in a module that imports nothing heavy: each run of one starts a process that imports
this, which takes seconds where torch comes along."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.envs.base import Step
from lmgym.types import Example, Message


class Quiz:
    """Two questions, one after the other; an answer earns its number of letters."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        self.asked = 1
        return "1?"

    def step(self, text: str, stop: str) -> Step:
        self.asked += 1
        over = self.asked > 2
        reward = float(sum(letter.isalpha() for letter in text))
        return Step([] if over else [{"role": "user", "content": "2?"}], reward, terminated=over)


class RestartingQuiz(Quiz):
    """The second question begins a new prompt if the first answer has an odd number of characters."""

    def step(self, text: str, stop: str) -> Step:
        return replace(super().step(text, stop), reward=float(len(text)), restart=bool(len(text) % 2))
