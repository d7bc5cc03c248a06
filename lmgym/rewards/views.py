"""The text that a reward sees: the answer without the model's thoughts, or with another text in its place."""

import re
from dataclasses import replace
from typing import Literal

from lmgym.types import Episode

Stripping = bool | Literal["opened"]
TAG = re.compile(r"<(?P<end>/?)think>")


def without_thinking(text: str, opened: bool = False) -> str:
    """The text after the model's thoughts, which are between <think> and </think>; empty if they never end.

    Returns the text after the last </think>, and "" if another <think> follows it. A text without any tag is returned
    whole. `opened` is for chat templates that write the <think> themselves: then a text without a tag is one unfinished
    thought, so the result is "".

    Example:
        >>> without_thinking("<think>3? 4?</think>4"), without_thinking("<think>3? 4?"), without_thinking("4")
        ('4', '', '4')
    """
    tags = list(TAG.finditer(text))
    if not tags:
        return "" if opened else text
    return text[tags[-1].end() :] if tags[-1]["end"] else ""


def strip_thoughts(episode: Episode, stripping: Stripping) -> Episode:
    """A copy of an episode whose last turn's text has no thoughts. The ids stay as sampled; the original, which is
    trained on, does not change.

    Example: strip_thoughts(episode, stripping="opened").text -> '4'
    """
    if not episode.turns:
        return episode
    *before, last = episode.turns
    text = without_thinking(last.given + last.text, stripping == "opened")
    return replace(episode, turns=[*before, replace(last, given="", text=text)])


def with_text(episode: Episode, text: str) -> Episode:
    """A copy of an episode with this text as its last message. No turn of the copy continues a message.

    Example: with_text(episode, "4").text -> '4'
    """
    if not episode.turns:
        return episode
    *before, last = (replace(turn, continuation=None) for turn in episode.turns)
    return replace(episode, turns=[*before, replace(last, given="", text=text)])
