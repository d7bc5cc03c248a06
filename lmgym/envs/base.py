"""What an environment is: text in, text out, one object per episode. It imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmgym.episode import Example, Message


@dataclass(frozen=True)
class Step:
    """What an environment answers to an action.

    Example: a wrong guess, with one more try: Step(messages=[{"role": "user", "content": "higher"}], reward=0.0)
    """

    messages: Sequence[Message] = ()  # put before the policy's next turn; empty where the episode is over
    reward: float = 0.0  # earned by the action just taken
    terminated: bool = False  # the episode came to its own end
    truncated: bool = False  # it was cut off (time limit), so its value is not zero
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode's environment. Built anew for each episode; a pure function of (example, seed, actions)."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        """Begin; returns the first prompt, as text or chat messages."""
        ...

    def step(self, text: str) -> Step:
        """Take the policy's turn (special tokens removed)."""
        ...
