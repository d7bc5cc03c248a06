"""`lmgym completion SHELL`: the Tab key completes commands, recipes, keys, their values, and files.

The shell asks `lmgym` itself, by argcomplete, so what it offers is never older than lmgym. The keys and values are
those of recipe.schema.json, so that no torch is imported."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmgym.config.packaged import FOLDER, find_recipe, packaged_recipes
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError

SHELLS = ("bash", "zsh", "fish")
RECIPES = ("what", "first", "second")  # arguments that may be the name of a packaged recipe
DEEPEST = 3  # as in algorithm.surrogate.clip_high

Schema = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS, help='bash, zsh: put eval "$(lmgym completion bash)" into ~/.bashrc '
                        "(or ~/.zshrc, behind compinit); fish: lmgym completion fish > "
                        "~/.config/fish/completions/lmgym.fish")  # fmt: skip


def run(given: argparse.Namespace) -> None:
    """Print the shell's own function, to be evaluated by it."""
    from argcomplete import shell_integration

    print(shell_integration.shellcode(["lmgym"], shell=given.shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks with what may stand at the cursor, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=offered)  # type: ignore[arg-type]


def offered(prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """What the argument of a command may be, each beginning with `prefix`; where nothing else is known, files."""
    if action.dest == "overrides":
        return [word for word in _overrides(prefix, str(getattr(parsed_args, "what", ""))) if word.startswith(prefix)]
    known = {"kind": list(BUILTIN), "name": list(packaged_recipes())}.get(action.dest)
    if known is None:
        known = _files(prefix) + (list(packaged_recipes()) if action.dest in RECIPES else [])
    return [word for word in known if word.startswith(prefix)]


def _overrides(prefix: str, recipe: str) -> Iterator[str]:
    """KEY= for all keys of a recipe; behind KEY= the values that it may have, if it is one of a few."""
    schema: Schema = json.loads((FOLDER / "recipe.schema.json").read_text(encoding="utf-8"))
    tree = _tree(recipe)
    nodes = dict(_keys(schema, schema, tree))
    stage = next(node for node in _variants(schema["properties"]["stages"], schema) if "items" in node)["items"]
    for number, own in enumerate(tree.get("stages") or []):
        merged = {**tree, **own} if isinstance(own, dict) else tree
        name = merged.get("name", number)
        nodes |= {f"stages.{name}.{key}": node for key, node in _keys(stage, schema, merged)}
    key, equals, value = prefix.partition("=")
    if not equals:
        yield from (f"{name}=" for name in nodes)
    elif key in nodes:
        values = list(_values(nodes[key], schema)) or _files(value)
        yield from (f"{key}={one}" for one in values)


def _tree(recipe: str) -> dict[str, Any]:
    """The recipe (or that of a run folder), which names its stages and algorithms; empty if it cannot be read."""
    from lmgym.config.yaml import read_yaml

    try:
        path = Path(recipe) / "recipe.yaml" if Path(recipe).is_dir() else find_recipe(recipe)
        return read_yaml(path)
    except (LmgymError, OSError, ValueError):
        return {}


def _keys(node: Schema, schema: Schema, tree: Any, depth: int = DEEPEST) -> Iterator[tuple[str, Schema]]:
    """The dotted keys of an object, each with its schema. `tree` is what the recipe says there: of a section that has a
    name, the keys are those of that name."""
    own = tree if isinstance(tree, Mapping) else {"name": tree}
    for variant in _variants(node, schema):
        properties: Mapping[str, Schema] = variant.get("properties", {})
        names = properties.get("name", {}).get("enum")
        if depth and (not names or own.get("name") is None or own["name"] in names):
            for key, inner in properties.items():
                yield key, inner
                yield from ((f"{key}.{below}", at) for below, at in _keys(inner, schema, own.get(key), depth - 1))


def _values(node: Schema, schema: Schema) -> Iterator[str]:
    """The values of a key with few: names, true and false."""
    for variant in _variants(node, schema):
        yield from (str(value) for value in variant.get("enum", []))
        if variant.get("type") == "boolean":
            yield from ("true", "false")


def _variants(node: Schema, schema: Schema) -> Iterator[Schema]:
    """A schema, and whatever it refers to or offers as alternatives."""
    yield node
    inner = [*node.get("allOf", []), *node.get("anyOf", [])]
    if "$ref" in node:
        target: Any = schema
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        inner.append(target)
    for one in inner:
        yield from _variants(one, schema)


def _files(prefix: str) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter()(prefix))
