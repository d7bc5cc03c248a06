"""One prompt, one answer: the environment of most text tasks."""

from collections.abc import Sequence

from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example, Message


@register("env", "single_turn")
class SingleTurn:
    """Shows the prompt of the example and ends with the first answer. It pays nothing; the recipe's rewards do."""

    asks_once = True
    """Its episodes are the task's prompts, each with one answer."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        return example.prompt

    def step(self, text: str, stop: str) -> Step:
        cut = stop in ("length", "context")  # an incomplete answer: its value is not zero
        return Step(terminated=not cut, truncated=cut)
