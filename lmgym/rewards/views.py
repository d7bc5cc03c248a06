"""The text that a reward sees: the answer without the model's thoughts, or with another text in its place."""

import re
from dataclasses import replace
from typing import Any, Literal

from lmgym.text.chat import plain_text
from lmgym.text.pictures import decoded
from lmgym.types import Episode, Message

Stripping = bool | Literal["opened"]
CHAMPION = "champion"  # the key of `Example.meta` in which a reward finds the champion of a prompt
TAG = re.compile(r"<(?P<end>/?)think>")


def without_thinking(text: str, opened: bool = False) -> str:
    """The text after the model's thoughts, which are between <think> and </think>; empty if they never end.

    Returns the text after the last </think>, and "" if another <think> follows it. A text without any tag is returned
    whole. `opened` is for chat templates that write the <think> themselves: then a text without a tag is one unfinished
    thought, so the result is "".

    Example: without_thinking("<think>3? 4?</think>4"), without_thinking("<think>3? 4?"), without_thinking("4")
    -> ('4', '', '4')"""
    tags = list(TAG.finditer(text))
    if not tags:
        return "" if opened else text
    return text[tags[-1].end() :] if tags[-1]["end"] else ""


def strip_thoughts(episode: Episode, stripping: Stripping) -> Episode:
    """A copy of an episode whose last message has no thoughts; they are removed from all turns of that message. The ids
    stay as sampled; the original, which is trained on, does not change.

    Example: strip_thoughts(episode, stripping="opened").text -> '4'"""
    kept = without_thinking(episode.text, stripping == "opened")
    # What is kept is the end of the message, so its first characters are left out, turn by turn.
    out, turns = len(episode.text) - len(kept), list(episode.turns)
    for place in range(_begin_of_message(episode), len(turns)):
        for part in ("given", "text", "continuation"):
            old = getattr(turns[place], part) or ""
            if gone := min(out, len(old)):
                rest: dict[str, Any] = {part: old[gone:]}
                turns[place], out = replace(turns[place], **rest), out - gone
    return replace(episode, turns=turns)


def with_text(episode: Episode, text: str) -> Episode:
    """A copy of an episode whose last message is this text. The whole text is in the last turn.

    Example: with_text(episode, "4").text -> '4'"""
    if not episode.turns:
        return episode
    *before, last = episode.turns
    begin = _begin_of_message(episode)
    empty = [replace(turn, given="", text="", continuation="") for turn in before[begin:]]
    return replace(episode, turns=[*before[:begin], *empty, replace(last, given="", text=text)])


def _begin_of_message(episode: Episode) -> int:
    """The index of the turn in which the last message begins."""
    return max((n + 1 for n, turn in enumerate(episode.turns[:-1]) if turn.continuation is None), default=0)


def with_champion(episode: Episode, champion: str | None) -> Episode:
    """A copy of an episode whose example has this champion in its `meta` (champions.py); the episode itself, if there
    is none."""
    if champion is None:
        return episode
    example = episode.example
    return replace(episode, example=replace(example, meta={**example.meta, CHAMPION: champion}))


def as_sequence(episode: Episode, tokenizer: Any, special: bool, changed: bool = False) -> Episode:
    """A copy of an episode whose messages are two texts: what the model has read first, with its control tokens, and
    all that stands behind it (`special`: also with them). Without a tokenizer the texts are those of the data; where
    the answer's text was `changed` for the reward, that stands behind the prompt.

    Example: [message["content"] for message in as_sequence(episode, tokenizer, special=True).messages]
    -> ['<|im_start|>user\\n2+2=<|im_end|>\\n<|im_start|>assistant\\n', '4<|im_end|>']"""
    if not episode.turns:
        return episode
    first, *later = episode.turns
    read, written = str(plain_text(episode.example.prompt)), episode.text
    if tokenizer is not None:
        ids = [*first.action_ids, *(id for turn in later for id in (*turn.prompt_ids, *turn.action_ids))]
        read = decoded(tokenizer, first.source_ids or first.prompt_ids, clean_up_tokenization_spaces=False)
        behind = decoded(tokenizer, ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        given = "" if read.endswith(first.given) else first.given
        written = written if changed else given + behind
    pair: list[Message] = [{"role": "user", "content": read}, {"role": "assistant", "content": written}]
    return replace(episode, messages=pair)
