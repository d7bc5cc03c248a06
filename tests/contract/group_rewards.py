"""Rewards of groups, for test_group_rewards.py; a worker imports them."""

from lmgym.rewards.groups import of_groups
from lmgym.types import Example


@of_groups
def shortest(texts: list[list[str]], examples: list[Example], *, prize: float = 1.0) -> list[list[float]]:
    """The prize for the shortest answers to each prompt."""
    assert len(texts) == len(examples)
    return [[prize * (len(text) == min(map(len, group))) for text in group] for group in texts]


@of_groups
def raises_at_x(texts: list[list[str]], examples: list[Example]) -> list[list[float | None]]:
    """The place in the group; None for a single answer."""
    if any("x" in text for group in texts for text in group):
        raise ValueError("no score for an x")
    return [[float(place) for place in range(len(group))] if len(group) > 1 else [None] for group in texts]


@of_groups
def too_few(texts: list[list[str]], examples: list[Example]) -> list[list[float]]:
    return [group and [1.0] for group in texts]
