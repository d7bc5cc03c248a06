"""What a policy still reads of a conversation's past, where the recipe takes some of it away."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmgym.types import Message

THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Past:
    """How the messages before a turn are cut. `window`: only the last so many turns of the policy stay, each with what
    answered it, behind the first prompt. `thoughts`: drop takes what is between <think> and </think> out of earlier
    turns.

    Example: Past(window=3, thoughts="drop")"""

    window: int | None = None
    thoughts: Literal["keep", "drop"] = "keep"

    def cut(self, messages: Sequence[Message], first: int) -> list[Message]:
        """The messages that stay; `first` of them are the first prompt. Equal messages: nothing was taken away.

        Example:
            >>> said = [{"role": "assistant", "content": "<think>3?</think>4"}, {"role": "user", "content": "no"}]
            >>> Past(thoughts="drop").cut([{"role": "user", "content": "2+2="}, *said], first=1)[1]["content"]
            '4'
        """
        opening, later = list(messages[:first]), list(messages[first:])
        turns = [place for place, message in enumerate(later) if message["role"] == "assistant"]
        if self.window is not None and len(turns) > self.window:
            later = later[turns[-self.window] :]
        if self.thoughts == "drop":
            later = [_without_thoughts(one) if one["role"] == "assistant" else one for one in later]
        return [*opening, *later]


WHOLE = Past()


def _without_thoughts(message: Message) -> Message:
    """The message without its thoughts; one that ends inside of a thought loses that, too."""
    text = message["content"]
    # A chat template may have written the <think> itself.
    behind = text.rpartition("</think>")[2].lstrip() if "</think>" in text.partition("<think>")[0] else text
    # A <think> behind the last </think> has no end: cut there, lest the search for one goes to the end from each.
    opened = behind.find("<think>", behind.rfind("</think>") + 1)
    whole = behind if opened < 0 else behind[:opened]
    return {**message, "content": THOUGHT.sub("", whole).partition("<think>")[0]}
