"""`lmgym completion SHELL`: the Tab key completes commands, recipes, keys, their values, and files.

The shell asks `lmgym` itself, by argcomplete, so what it offers is never older than lmgym. The keys and values are
those of recipe.schema.json, so that no torch is imported."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmgym.config.packaged import find_recipe, packaged_recipes
from lmgym.config.schema_keys import recipe_keys, values_of
from lmgym.core.builtins import BUILTIN
from lmgym.core.errors import LmgymError

SHELLS = ("bash", "zsh", "fish")
RECIPES = ("what", "first", "second")  # arguments that may be the name of a packaged recipe


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
    if action.dest == "overrides" and hasattr(parsed_args, "what"):
        return [word for word in _overrides(prefix, str(getattr(parsed_args, "what", ""))) if word.startswith(prefix)]
    known = {"kind": list(BUILTIN), "name": list(packaged_recipes())}.get(action.dest)
    if known is None:
        known = _files(prefix) + (list(packaged_recipes()) if action.dest in RECIPES else [])
    return [word for word in known if word.startswith(prefix)]


def _overrides(prefix: str, recipe: str) -> Iterator[str]:
    """KEY= for all keys of a recipe; behind KEY= the values that it may have, if it is one of a few."""
    nodes = recipe_keys(_tree(recipe))
    key, equals, value = prefix.partition("=")
    if not equals:
        yield from (f"{name}=" for name in nodes)
    elif key in nodes:
        values = list(values_of(nodes[key])) or _files(value)
        yield from (f"{key}={one}" for one in values)


def _tree(recipe: str) -> dict[str, Any]:
    """The recipe (or that of a run folder), which names its stages and algorithms; empty if it cannot be read."""
    from lmgym.config.yaml import read_yaml

    try:
        path = Path(recipe) / "recipe.yaml" if Path(recipe).is_dir() else find_recipe(recipe)
        return read_yaml(path)
    except (LmgymError, OSError, ValueError):
        return {}


def _files(prefix: str) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter()(prefix))
