"""What a reward sees of an answer: without the thoughts that it begins with, or with another text in its place."""

import re
from dataclasses import replace
from typing import Literal

from lmgym.types import Episode

Stripping = bool | Literal["opened"]
TAG = re.compile(r"<(?P<end>/?)think>")


def without_thinking(text: str, opened: bool = False) -> str:
    """The text behind a model's thoughts, which stand between <think> and </think>; none where they have not ended.

    It is what follows the last </think>, and nothing if another <think> comes after that. Without any tag it is the
    whole text; but with `opened`, for a chat template that itself writes the <think>, such a text is one long thought,
    so nothing is left.

    Example:
        >>> without_thinking("<think>3? 4?</think>4"), without_thinking("<think>3? 4?"), without_thinking("4")
        ('4', '', '4')
    """
    tags = list(TAG.finditer(text))
    if not tags:
        return "" if opened else text
    return text[tags[-1].end() :] if tags[-1]["end"] else ""


def strip_thoughts(episode: Episode, stripping: Stripping) -> Episode:
    """A copy of an episode to be judged, its last turn's text without thoughts. The ids stay as they were sampled, and
    the episode that is trained on is another object.

    Example:
        >>> thoughtless(episode, stripping="opened").text
        '4'
    """
    if not episode.turns:
        return episode
    *before, last = episode.turns
    return replace(episode, turns=[*before, replace(last, text=without_thinking(last.text, stripping == "opened"))])


def with_text(episode: Episode, text: str) -> Episode:
    """A copy of an episode to be judged, whose last message is this text.

    Example:
        >>> with_text(episode, "4").text
        '4'
    """
    if not episode.turns:
        return episode
    *before, last = (replace(turn, continuation=None) for turn in episode.turns)
    return replace(episode, turns=[*before, replace(last, text=text)])
