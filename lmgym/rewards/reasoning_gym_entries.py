"""Answers and entries as the reasoning-gym library has them."""

import re
from typing import Any

from lmgym.types import Example

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def entry_of(example: Example) -> dict[str, Any]:
    """The library's record of an example; of another task's example, one with the same keys."""
    if "entry" in example.meta and "dataset" in example.meta:
        return dict(restored(example.meta["entry"]))
    answer = example.references[0] if example.references else example.meta.get("answer")
    return {"question": example.prompt, "answer": answer, "metadata": dict(example.meta)}


def restored(value: Any) -> Any:
    """The entry with its tuples, which JSON cannot hold: tasks/reasoning_gym.py writes them as {"tuple": [...]}."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"tuple"}:
            return tuple(restored(item) for item in value["tuple"])
        return {key: restored(item) for key, item in value.items()}
    return value
