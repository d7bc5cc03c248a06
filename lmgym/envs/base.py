"""What an environment is: text in, text out, one object per episode. It imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmgym.types import Example, Message


@dataclass(frozen=True)
class Step:
    """What an environment answers to an action.

    Usually `messages` follow, and the policy speaks again. With `continuation` the policy has not handed over yet: that
    text is put right behind its own, in the same message, without a gradient, and it goes on (an empty one just lets it
    go on). `unfinished` says that what it samples next belongs to the action it had begun, as behind the result of a
    calculator in the middle of a line: for discounts and returns per turn both are one turn.

    Example: a wrong guess, with one more try: Step(messages=[{"role": "user", "content": "higher"}], reward=0.0)
    A line of reasoning, with more to come: Step(continuation="")
    A calculator's result: Step(continuation="24>>", unfinished=True)
    """

    messages: Sequence[Message] = ()  # put before the policy's next turn; empty where the episode is over
    reward: float = 0.0  # earned by the action just taken
    terminated: bool = False  # the episode came to its own end
    truncated: bool = False  # it was cut off (time limit), so its value is not zero
    continuation: str | None = None  # in place of messages
    unfinished: bool = False
    restart: bool = False  # `messages` are a whole new prompt: the policy no longer sees what came before
    player: int | None = None  # who speaks next and reads the messages, where there are several; None: the same one
    others: Mapping[int, float] = field(default_factory=dict)  # what this step pays the other players
    info: dict[str, Any] = field(default_factory=dict)  # numbers and short texts about this step, for logs

    @property
    def over(self) -> bool:
        """Whether the episode has ended with this step."""
        return self.terminated or self.truncated


class Env(Protocol):
    """One episode's environment. Built anew for each episode; a pure function of (example, seed, actions).

    Besides the two methods it may have
    - `stop: tuple[str, ...]`, strings that end each of the policy's turns, besides those of the recipe;
    - `demonstrate() -> str`, what a demonstrator would say now, for supervised stages;
    - `close()`, called when the episode is over;
    - `players: int`, how many play, `first: int`, who begins, and `learners`, the players whose turns train (all, where
      there is none). Each player has a conversation and an episode of his own.
    """

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        """Begin; returns the first prompt, as text or chat messages."""
        ...

    def step(self, text: str, stop: str) -> Step:
        """Take the policy's turn (special tokens removed). `stop` says why it ended, as `Turn.stop` does: "eos", "stop"
        (a stop string or id), "length" (cut off at max_new_tokens) or "context" (the model is full)."""
        ...
