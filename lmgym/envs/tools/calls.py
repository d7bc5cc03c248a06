"""Calls of tools, and the JSON that they are written in. The text is hostile: numbers, nesting and keys are bounded."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEEPEST = 50  # nested lists and objects
LONGEST = 1_000  # digits of a whole number


@dataclass(frozen=True)
class Call:
    """One tool call of a model.

    Example: Call("python", {"code": "6 * 7"})"""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A call that cannot be read, and the reason.

    Example: Unreadable("not valid JSON: Expecting value: line 1 column 9 (char 8)")"""

    reason: str


def shorter(text: str, most: int = 80) -> str:
    """The text; if it is longer than `most` characters, its beginning and three dots."""
    return text if len(text) <= most else text[:most] + "..."


def shallow(value: Any) -> bool:
    """True if at most `DEEPEST` lists and objects are in each other."""
    # Level by level, without recursion: the text may be hostile.
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for item in level if isinstance(item, list | dict) for inner in _inside(item)]
        if not level:
            return True
    return False


def _inside(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def why(error: Exception) -> str:
    """The reason of a text that is no JSON, for the model to read."""
    return "nested too deeply" if isinstance(error, RecursionError) else shorter(str(error), 120)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"the key '{shorter(name)}' comes twice")
        tree[name] = value
    return tree


def _whole(digits: str) -> int:
    if len(digits) > LONGEST:
        raise ValueError(f"{shorter(digits)} is too large a number")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shorter(digits)} is too large a number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_no_constant
)
