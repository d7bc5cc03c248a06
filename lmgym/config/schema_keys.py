"""The keys of a recipe and their values, read from recipe.schema.json: at once, without torch."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lmgym.config.packaged import FOLDER

DEEPEST = 3  # as in algorithm.surrogate.high

Schema = Mapping[str, Any]


def recipe_keys(tree: Mapping[str, Any]) -> dict[str, Schema]:
    """All dotted keys that a recipe can have, each with its schema; keys of stages under the names that `tree` gives
    them, and of a section with a name (an algorithm, a task) those of the name in `tree`.

    Example: recipe_keys({"algorithm": "grpo"})["algorithm.group_size"]["default"] -> 8"""
    nodes = dict(_keys(recipe_schema(), tree))
    stages = tree.get("stages")
    for number, own in enumerate(stages if isinstance(stages, list) else []):
        merged = {**tree, **own} if isinstance(own, dict) else tree
        name = merged.get("name", number)
        nodes |= {f"stages.{name}.{key}": node for key, node in _keys(_stage(), merged)}
    return nodes


def top_level_keys() -> list[str]:
    """The keys at the top of a recipe.

    Example: top_level_keys() -> ["seed", "out", "threads", ...]"""
    return list(recipe_schema()["properties"])


def stage_keys() -> set[str]:
    """The keys of a stage, which a recipe may also give at its top for all stages."""
    return {*_stage()["properties"]} - {"name"}


def _keys(node: Schema, tree: Any, depth: int = DEEPEST) -> Iterator[tuple[str, Schema]]:
    """The dotted keys of an object, each with its schema. `tree` is what the recipe says there: of a section that has a
    name, the keys are those of that name."""
    own = tree if isinstance(tree, Mapping) else {"name": tree}
    for variant in variants(node):
        properties: Mapping[str, Schema] = variant.get("properties", {})
        names = properties.get("name", {}).get("enum")
        if depth and (not names or own.get("name") is None or own["name"] in names):
            for key, inner in properties.items():
                yield key, inner
                yield from ((f"{key}.{below}", at) for below, at in _keys(inner, own.get(key), depth - 1))


def values_of(node: Schema) -> Iterator[str]:
    """The values of a key with few: names, true and false."""
    for variant in variants(node):
        yield from (str(value) for value in variant.get("enum", []))
        if variant.get("type") == "boolean":
            yield from ("true", "false")


def variants(node: Schema) -> Iterator[Schema]:
    """A schema, and whatever it refers to or offers as alternatives."""
    yield node
    inner = [*node.get("allOf", []), *node.get("anyOf", [])]
    if "$ref" in node:
        target: Any = recipe_schema()
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        inner.append(target)
    for one in inner:
        yield from variants(one)


def _stage() -> Schema:
    stage: Schema = next(node for node in variants(recipe_schema()["properties"]["stages"]) if "items" in node)["items"]
    return stage


@cache
def recipe_schema() -> Schema:
    """The JSON Schema of recipes."""
    schema: Schema = json.loads((FOLDER / "recipe.schema.json").read_text(encoding="utf-8"))
    return schema
