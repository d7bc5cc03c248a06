"""Environments of tests/failing_runs.py, in a module that imports nothing heavy: it is what their processes import."""

from lmgym.envs.base import Env, Step
from lmgym.envs.dialogue import validity
from lmgym.types import Example, Message


class Unreliable(Env):
    """Fails for every fourth problem."""

    def reset(self, example: Example, key: int) -> list[Message]:
        self.fails = str(example.id).endswith(("0", "4", "8"))
        return [{"role": "user", "content": str(example.prompt)}]

    def step(self, text: str, stop: str) -> Step:
        if self.fails:
            raise ValueError("out of order")
        return Step([], reward=float("a" in text), terminated=True)


class Talkative(Env):
    """Says so much that the model's context is full after a turn or two."""

    def reset(self, example: Example, key: int) -> list[Message]:
        return [{"role": "user", "content": str(example.prompt)}]

    def step(self, text: str, stop: str) -> Step:
        return Step([{"role": "user", "content": "more " * 20}], reward=float("a" in text))


class Strict(Env):
    """Takes only one word for an action, which two letters cannot be."""

    def reset(self, example: Example, key: int) -> list[Message]:
        return [{"role": "user", "content": str(example.prompt)}]

    def step(self, text: str, stop: str) -> Step:
        return Step(terminated=True, reward=float("a" in text), info=validity("" if text == "forward" else "no move"))
