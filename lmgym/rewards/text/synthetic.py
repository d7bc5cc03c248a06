"""Rewards of the synthetic tasks: increasing numbers, and dates. They need no references."""

import math
import re
from itertools import pairwise

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import linear_time
from lmgym.types import Example

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@register("reward", "increasing_numbers")
@linear_time
def increasing_numbers(texts: list[str], examples: list[Example], *, min_tokens: int = 20) -> list[float]:
    """Length of the strictly increasing run at the beginning of the text's numbers / max(n, min_tokens / 2); 0 without
    a number.

    The text is split at white space into n tokens. The numbers are the tokens that Python's `float` reads ("7", "-1.5",
    "2e3"), except `nan` and infinities. Other tokens do not end the run, but they count in n. The run ends at the first
    number that is not greater than the one before it. So the value 1 needs at least min_tokens / 2 tokens, all of them
    numbers and each greater than the last.

    Source: Ramamurthy et al. 2022 (RL4LMs), reward increasing_numbers, which calls `nan` and `inf` numbers too.

    Example: increasing_numbers(["1 2 3 4 5", "1 2 2 3", "a b 7 8 c"], examples)  # 5 / 10, 2 / 10, 2 / 10
    -> [0.5, 0.2, 0.2]"""
    if min_tokens < 1:
        raise LmgymError(f"key 'rewards.increasing_numbers.min_tokens' must be at least 1, not {min_tokens}")
    values = []
    for text in texts:
        tokens = text.split()
        numbers = [number for number in map(_number, tokens) if number is not None]
        values.append(_leading_run(numbers) / max(len(tokens), min_tokens / 2))
    return values


@register("reward", "dates")
@linear_time
def dates(texts: list[str], examples: list[Example]) -> list[float]:
    """1 if the text contains a date as 2021-03-04 (four digits, a dash, two digits, a dash, two digits), else 0.

    The day need not exist, and any text may surround it. Source: RL4LMs, reward sentences_with_dates, metric dates.

    Example: dates(["It rained on 2021-03-04.", "It rained on 4 March."], examples) -> [1.0, 0.0]"""
    return [float(DATE.search(text) is not None) for text in texts]


def _number(token: str) -> float | None:
    try:
        number = float(token)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _leading_run(numbers: list[float]) -> int:
    """How many numbers at the beginning are strictly increasing."""
    for index, (before, after) in enumerate(pairwise(numbers), start=1):
        if after <= before:
            return index
    return len(numbers)
