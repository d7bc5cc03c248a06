"""An environment of two turns, in a module that imports nothing heavy: each run of it starts a process that imports
this, which takes seconds where torch comes along."""

from collections.abc import Sequence

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
