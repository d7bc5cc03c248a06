"""The words of a step's answers that traces/ does not keep whole: texts.json in the step's zip, while they are few."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmgym.logs.traces.files import TEXTS, open_shard, read_member
from lmgym.types import Episode

MOST_CHARACTERS = 2**18  # of a step's prompts and answers; of more none is kept


@dataclass(kw_only=True)
class TraceTexts:
    """What was asked and said: the prompt of each group, and of each answer a text a turn, by its index.

    Example: TraceTexts(prompts={3: "2+2="}, answers={24: ["4"], 25: ["5"]})"""

    prompts: dict[int, Any] = field(default_factory=dict)
    answers: dict[int, list[str]] = field(default_factory=dict)


def texts_of(episodes: Iterable[Episode], whole: Collection[int]) -> TraceTexts:
    """The texts of the answers that are not kept `whole`; no text at all if they have more than MOST_CHARACTERS."""
    texts, size = TraceTexts(), 0
    for one in episodes:
        if one.index in whole:
            continue
        said = [turn.given + turn.text for turn in one.turns]
        size += sum(map(len, said))
        if one.group not in texts.prompts:
            prompt = one.example.prompt
            messages = [
                {"role": str(part.get("role", "")), "content": str(part.get("content", ""))}
                for part in prompt
                if isinstance(part, Mapping)
            ]
            texts.prompts[one.group] = prompt if isinstance(prompt, str) else messages
            size += len(prompt) if isinstance(prompt, str) else sum(len(part["content"]) for part in messages)
        if size > MOST_CHARACTERS:
            return TraceTexts()
        texts.answers[one.index] = said
    return texts


def read_texts(folder: Path, stage: int, step: int) -> TraceTexts:
    """The texts of one step; none if it has none. What is no text is left out. Raises LmgymError if it is damaged."""
    with open_shard(folder, stage, step) as shard:
        if TEXTS not in shard.namelist():
            return TraceTexts()
        tree = json.loads(read_member(shard, TEXTS))
    prompts, answers = (_by_number(tree, name) for name in ("prompts", "answers"))
    said = {
        index: own
        for index, own in answers.items()
        if isinstance(own, list) and all(isinstance(one, str) for one in own)
    }
    return TraceTexts(
        prompts={group: own for group, own in prompts.items() if isinstance(own, str | list)}, answers=said
    )


def _by_number(tree: Any, name: str) -> dict[int, Any]:
    own = tree.get(name) if isinstance(tree, dict) else None
    items = own.items() if isinstance(own, dict) else ()
    return {int(key): value for key, value in items if key.isascii() and key.isdecimal() and len(key) < 12}
