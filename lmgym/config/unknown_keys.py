"""Keys that a recipe's sections do not have, found with recipe.schema.json: without torch, and only where it is sure.

What only the building of a recipe can know (names of plug-ins, of modules) is left to it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmgym.config.schema_keys import Schema, variants
from lmgym.core import registry
from lmgym.core.errors import LmgymError

FORMER = {"drift_coefficient"}  # names of keys in earlier versions, which are still read (core/constraints.FormerKey)


def check_keys(node: Schema, tree: Any, where: str = "") -> None:
    """Raise LmgymError for the first key below `tree` that its schema `node` does not have.

    Example: check_keys(recipe_schema(), {"sampling": {"top_n": 3}}) raises "unknown key 'top_n' in 'sampling'; ..." """
    if isinstance(tree, list):
        for items in [one["items"] for one in variants(node) if "items" in one][:1]:
            for number, item in enumerate(tree):
                name = item.get("name", number) if isinstance(item, Mapping) else number
                check_keys(items, item, f"{where}.{name}")
        return
    if not isinstance(tree, Mapping) or "expand" in tree:  # several sections in place of one
        return
    known = _known(node, tree)
    if known is None:
        return
    for key, value in tree.items():
        inner = [property for name, property in known if re.fullmatch(name, str(key))]
        if not inner and key not in FORMER:
            names = [name for name, _ in known if name.isidentifier()]
            raise LmgymError(f"unknown key {_placed(where.lstrip('.'), str(key))}; {registry.suggest(str(key), names)}")
        if len(inner) == 1:
            check_keys(inner[0], value, f"{where}.{key}")


def _placed(where: str, key: str) -> str:
    """A key and its section, in the words of the build: arguments are named by their path."""
    if where.rpartition(".")[2] in ("task", "env", "runs"):
        return f"'{where}.{key}'"
    return f"'{key}' in '{where}'" if where else f"'{key}'"


def _known(node: Schema, tree: Mapping[str, Any]) -> Sequence[tuple[str, Schema]] | None:
    """The keys of an object as patterns, each with its schema; None if it may have others, too."""
    objects = [one for one in variants(node) if "properties" in one or "patternProperties" in one]
    if len(objects) > 1:  # of a section with a name, those of this name
        objects = [one for one in objects if tree.get("name") in _names(one)]
    closed = len(objects) == 1 and objects[0].get("additionalProperties") is False
    return list(_keys(objects[0])) if closed else None


def _names(schema: Schema) -> list[Any]:
    """The names of a section of which a schema is about."""
    names: list[Any] = schema.get("properties", {}).get("name", {}).get("enum", [])
    return names


def _keys(schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield from ((re.escape(key), inner) for key, inner in schema.get("properties", {}).items())
    yield from schema.get("patternProperties", {}).items()
