"""Parts: what a section of a recipe chooses by name, each with fields of its own.

    surrogate: {name: clip, high: 0.28}   ->   Clip(high=0.28)

A kind of part is a base class; its members are registered under that kind, so a plug-in adds one without touching what
uses it. A key that a part does not have cannot be written."""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import check_fields

P = TypeVar("P", bound="Part")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part. Its fields are checked against their type hints' bounds whoever builds it, as a section's are.

    Example:
        >>> @register("surrogate", "mine")
        ... @dataclass(frozen=True, kw_only=True)
        ... class Mine(Surrogate):
        ...     bound: PositiveFloat = 1.0
    """

    kind: ClassVar[str] = ""
    """The kind under which it is registered, which is also its key."""
    section: ClassVar[str] = ""
    """Its place in a recipe, for errors."""

    def __post_init__(self) -> None:
        check_fields(self)


def part_name(part: Part) -> str:
    """The name under which a part's class is registered. Example: part_name(Clip()) -> "clip" """
    return registry.name_of(part.kind, type(part))


def documentation(cls: type) -> str:
    """A class's own docstring up to its first example; "" if it has none, or only the one that dataclasses make up.

    Example: documentation(Sapo) -> "-4 / tau sigmoid(tau (r - 1)) A: a gate that closes softly (SAPO, ...)."
    """
    text = cls.__dict__.get("__doc__") or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text).split("\n\nExample")[0]


def check_part(kind: type[P], value: Any) -> None:
    """Raise LmgymError where a field that holds a part holds something else; recipes are turned into parts before."""
    if not isinstance(value, kind):
        raise LmgymError(
            f"{kind.section} is {value!r}; in Python it is an object of a class that extends {kind.__name__}"
        )
