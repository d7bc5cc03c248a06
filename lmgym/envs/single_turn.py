"""One prompt, one answer: what most text tasks are."""

from collections.abc import Sequence

from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.types import Example, Message


@register("env", "single_turn")
class SingleTurn:
    """Shows the example's prompt and ends with the first answer; the rewards do the judging."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        return example.prompt

    def step(self, text: str, stop: str) -> Step:
        cut = stop in ("length", "context")  # an answer without its end, whose value is not zero
        return Step(terminated=not cut, truncated=cut)
