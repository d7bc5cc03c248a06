"""Use a file of RL4LMs as a recipe, in `lmgym train`, `check`, `eval`, `generate` and `convert`."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmgym.compat.rl4lms.convert import conversions, text
from lmgym.config.build import build_config
from lmgym.config.yaml import apply_override
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import converted


@contextmanager
def recipes(path: Path, overrides: Sequence[str] = ()) -> Iterator[list[Path]]:
    """Convert a file of RL4LMs to recipe files, which exist within the `with`; warnings go to standard error.

    A file without a sweep is one recipe of the same name; the recipes of a sweep are named by their values. Of
    `overrides` only `plugins=` is read, since the conversion must know the names that plugins register. An LmgymError
    of the body names the user's file where it names a recipe.

    Example:
        >>> with recipes(Path("gpt2_ppo.yml")) as found:
        ...     config = load_config(found[0])
    """
    tree: dict[str, list[str]] = {}
    for override in overrides:
        if override.startswith("plugins="):
            apply_override(tree, override, ())
    for plugin in converted(list[str], tree.get("plugins") or [], "plugins"):
        registry.load_plugin(plugin)
    found = conversions(path)
    several = f", a sweep of {len(found)}" if len(found) > 1 else ""
    print(f"lmgym: {path} is a configuration of RL4LMs{several}; converted to a recipe", file=sys.stderr)
    for warning in dict.fromkeys(warning for conversion in found.values() for warning in conversion.warnings):
        print(f"lmgym: not as in RL4LMs: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for label, conversion in found.items():
            name = f"{path.stem}-{label}" if label else path.stem
            files.append(Path(folder) / f"{name}.yaml")
            files[-1].write_text(text(conversion, path.name), encoding="utf-8")
        try:
            yield files
        except LmgymError as error:  # the user knows the file, not the recipes that were made of it
            sentence = str(error)
            for file in files:
                sentence = sentence.replace(str(file), named_after(file, path))
            raise LmgymError(sentence) from error


def named_after(recipe: Path, path: Path) -> str:
    """What a user calls a recipe of `recipes(path)`: the file, and of a sweep the values.

    Example:
        >>> named_after(Path("made/gpt2_ppo-seed-1.yaml"), Path("gpt2_ppo.yml"))
        'gpt2_ppo.yml (seed-1)'
    """
    label = recipe.stem.removeprefix(path.stem).removeprefix("-")
    return f"{path} ({label})" if label else str(path)


def run_converted(given: argparse.Namespace, path: Path) -> int:
    """Run a parsed command of `lmgym` for each recipe of a file; returns the first exit status that is not 0. What the
    command says names the user's file (`given.shown`)."""
    overrides = given.overrides
    with recipes(path, overrides) as found:
        for recipe in found:
            given.what, given.shown = str(recipe), named_after(recipe, path)
            if len(found) > 1:  # each run has a folder of its own inside of `out`
                given.overrides = [f"{o}/{recipe.stem}" if o.startswith("out=") else o for o in overrides]
            if status := int(given.run(given) or 0):
                return status
    return 0


def printed(path: Path) -> str:
    """The recipe of a file as YAML, or the recipes of a sweep as several YAML documents; each is checked to load.
    Raises LmgymError as `conversions` does."""
    texts = []
    for label, conversion in conversions(path).items():
        try:
            build_config(conversion.recipe)
        except LmgymError as error:
            raise LmgymError(f"{path}: {error}") from error
        origin = f"{path.name} ({label})" if label else path.name
        texts.append(text(conversion, origin))
    return "\n---\n".join(texts)
