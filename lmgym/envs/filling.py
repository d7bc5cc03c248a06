"""Texts and arguments of a recipe with places in braces, filled from what an environment or a task's row says."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.types import Example, RecipeText

PLACE = re.compile(r"\{(\w+)\}")


def filled(text: str, values: Mapping[str, Any], written: Callable[[Any], str], key: str) -> str:
    """The text with each {name} replaced by that value, `written`; pictures stay pictures. Raises LmgymError, which
    names the `key`, for a name that has none.

    Example: filled("{board}\\nYou can: {actions}", {"board": "x.o", "actions": "2"}, str, "env.show")"""
    pieces = enumerate(PLACE.split(text))  # texts, and between them names
    return RecipeText.join(*(written(_known(piece, values, key)) if n % 2 else piece for n, piece in pieces))


def from_row(arguments: Mapping[str, Any], example: Example, key: str) -> dict[str, Any]:
    """The arguments, each text that is one place, such as "{level}", replaced by that entry of the example's meta, as
    it stands there.

    Example: from_row({"level": "{level}"}, Example("a/0", "?", meta={"level": 3}), "env.options") -> {"level": 3}"""
    found = {}
    for name, value in arguments.items():
        place = PLACE.fullmatch(value) if isinstance(value, str) else None
        where = f"{key}.{name}: example '{example.id}'"
        found[name] = value if place is None else _known(place[1], example.meta, where)
    return found


def _known(name: str, values: Mapping[str, Any], key: str) -> Any:
    if name not in values:
        raise LmgymError(f"{key}: there is no '{name}'; {suggest(name, map(str, values))}")
    return values[name]
