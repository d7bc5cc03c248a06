"""Environments of few turns, in a module that imports nothing heavy: each run of one starts a process that imports
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


class Question:
    """The same question for all."""

    def reset(self, example: Example, seed: int) -> str:
        return "?"

    def step(self, text: str, stop: str) -> Step:
        return Step(reward=float(sum(letter.isalpha() for letter in text)), terminated=True)


class Rounds:
    """One to three turns, by the prompt; the answers earn nothing for themselves."""

    def reset(self, example: Example, seed: int) -> str:
        self.left = int(example.id.rpartition("/")[2]) % 3
        return "go"

    def step(self, text: str, stop: str) -> Step:
        self.left -= 1
        return Step([{"role": "user", "content": "on"}], terminated=self.left < 0)


class Unreliable:
    """Two turns, or an exception."""

    def reset(self, example: Example, seed: int) -> str:
        self.fails, self.turns = seed % 2 == 0, 0
        return example.prompt if isinstance(example.prompt, str) else ""

    def step(self, text: str, stop: str) -> Step:
        if self.fails:
            raise ValueError("out of order")
        self.turns += 1
        if self.turns == 2:
            return Step([], terminated=True, info={"length": len(text)})
        return Step([{"role": "user", "content": "go on"}])


class Talk:
    """A conversation of four long answers to one prompt of a task."""

    def reset(self, example: Example, key: int) -> list[Message]:
        self.turns = 0
        return [{"role": "user", "content": "?"}]

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        over = self.turns == 4
        return Step([] if over else [{"role": "user", "content": "!" * 100}], reward=1.0, terminated=over)
