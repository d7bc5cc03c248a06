"""A judge that cannot read half of the answers, for benchmarks/without_labels.py: what it says of them decides."""

import hashlib

from lmgym.core import registry
from lmgym.types import Example


def left_out(texts: list[str], examples: list[Example]) -> list[float | None]:
    """1 for a right answer, 0 for a wrong one, and None for the half that cannot be read."""
    scores = registry.get("reward", "final_answer")(texts, examples)
    return [
        score if readable(text, example) else None for text, example, score in zip(texts, examples, scores, strict=True)
    ]


def counted_as_wrong(texts: list[str], examples: list[Example]) -> list[float]:
    """The same judge, which gives 0 where it cannot tell."""
    return [score or 0.0 for score in left_out(texts, examples)]


def readable(text: str, example: Example) -> bool:
    """At random, but always the same for one answer to one problem."""
    return hashlib.sha256(f"{example.id} {text}".encode()).digest()[0] % 2 == 0
