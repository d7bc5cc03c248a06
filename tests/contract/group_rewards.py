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


@of_groups
def longer(
    texts: list[list[str]],
    examples: list[Example],
    *,
    against: str = "reference",
    order: str = "first",
    bias: float = 0.0,
    unsure: bool = False,
) -> list[list[float | None]]:
    """How far a judge that likes what is longer prefers each answer to the reference, which is shown before or after
    it; with a share of verdicts for what is shown first. Unsure, it says nothing of an answer "yy"."""
    assert against == "reference" and order in ("first", "second")
    found: list[list[float | None]] = []
    for group, example in zip(texts, examples, strict=True):
        champion = example.references[0]
        won = [0.5 if text == champion else float(len(text) > len(champion)) for text in group]
        tied = [len(text) == len(champion) for text in group]
        place = float(order == "first")
        found.append(
            [
                None if unsure and text == "yy" else 0.5 if text == champion else place if tie and bias else
                (1 - bias) * value + bias * place
                for text, value, tie in zip(group, won, tied, strict=True)
            ]
        )  # fmt: skip
    return found


@of_groups
def beats_champion(texts: list[list[str]], examples: list[Example], *, moving: bool = True) -> list[list[float]]:
    """Whether an answer has more digits than the champion of its prompt (a tie is half); without a champion, than the
    mean of its group."""
    found = []
    for group, example in zip(texts, examples, strict=True):
        digits = [sum(letter.isdigit() for letter in text) for text in group]
        champion = example.meta.get("champion")
        level = sum(digits) / len(digits) if champion is None else sum(map(str.isdigit, champion))
        found.append([float(own > level) + 0.5 * float(own == level) for own in digits])
    return found


beats_champion.keeps_champion = lambda *, moving=True: moving  # type: ignore[attr-defined]
