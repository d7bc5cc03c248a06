"""Rewards that cannot judge some answers, for test_unjudged_answers.py; a worker imports them."""

from collections.abc import Sequence

from lmgym.rewards.base import linear_time
from lmgym.types import Example


@linear_time
def even_lengths(texts: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    """The number of letters over 6; None for an odd number of them."""
    return [None if len(text) % 2 else len(text) / 6 for text in texts]


@linear_time
def nothing(texts: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    return [None for _ in texts]


@linear_time
def first_only(texts: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    """Judges the answers to one prompt of the four of a step, so that some draws have none."""
    return [1.0 if example.id.endswith("/3") else None for example in examples]


def raises_at_x(texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    if any("x" in text for text in texts):
        raise ValueError("no score for an x")
    return [float(len(text)) for text in texts]


def odd_raises(texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    if any(len(text) % 2 for text in texts):
        raise ValueError("an odd text")
    return [len(text) / 6 for text in texts]


def hangs_at_x(texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    while any("x" in text for text in texts):
        pass
    return [float(len(text)) for text in texts]


def prefixes(texts: Sequence[str], examples: Sequence[Example]) -> list[float | None]:
    """The length of a text; None for one of two letters."""
    return [None if len(text) == 2 else float(len(text)) for text in texts]
