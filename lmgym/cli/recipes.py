"""What commands share: the recipe or run folder that they name, and quick imports."""

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing

if TYPE_CHECKING:
    from lmgym.config.schema import Config
    from lmgym.experiments.named_models import NamedModel


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and transformers in a fifth less time: without looking for garbage among new classes and functions.
    Says that it does, since it takes seconds.

    Example:
        >>> with quick_imports():
        ...     from lmgym.training.loop import train
    """
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        print("lmgym: loading PyTorch, which takes some seconds", file=sys.stderr, flush=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        with doing("loading PyTorch"):
            yield
    finally:
        if collects:
            gc.enable()


def add_recipe(parser: argparse.ArgumentParser, what: str = "recipe or run") -> None:
    """The arguments `what` (a recipe or a run folder) and `key=value`."""
    parser.add_argument("what", metavar="RECIPE_OR_RUN", help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


@doing("reading the recipe")
def read_recipe(given: argparse.Namespace) -> tuple["Config", Path | None]:
    """The config of a recipe or a run folder, and that folder (None for a recipe)."""
    from lmgym.config.build import load_config

    what = Path(given.what)
    if not what.is_dir():
        return load_config(what, given.overrides), None
    if not (what / "recipe.yaml").is_file():
        raise LmgymError(f"{what} is a folder without a recipe.yaml, so it is no run; name a recipe or a run folder")
    refuse_out(what, given.overrides)
    config = load_config(what / "recipe.yaml", given.overrides)
    config.out = str(what)
    return config, what


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that asks a model: those of `add_recipe`, and `--model`."""
    add_recipe(parser, "recipe, run or checkpoint of a run")
    other = "ask this model as the recipe says: a model folder (LoRA adapters too), a run, or a Hub id"
    parser.add_argument("--model", metavar="FOLDER_OR_ID", help=other)


@doing("reading the recipe")
def read_model(given: argparse.Namespace) -> "NamedModel":
    """The model that `add_model`'s arguments name, not loaded yet."""
    from lmgym.experiments.named_models import model_of_command

    if Path(given.what).is_dir():
        refuse_out(Path(given.what), given.overrides)
    named = model_of_command(given.verb, given.what, given.model, given.overrides)
    return named if given.model else replace(named, name=shown(given))


def shown(given: argparse.Namespace) -> str:
    """What the user has named: `what`, or the file that a recipe was converted from."""
    return str(getattr(given, "shown", given.what))


def next_command(verb: str, given: argparse.Namespace) -> str:
    """A command about the same recipe or run, with the same overrides, as it can be pasted into a shell.

    Example: next_command("train", given) -> "lmgym train recipe.yaml 'runs.seeds=[0,1]'"
    """
    return shlex.join(["lmgym", verb, shown(given).split(" (")[0], *given.overrides])


def refuse_out(folder: Path, overrides: Sequence[str]) -> None:
    """Raise LmgymError for `out=` together with a run folder, which cannot move."""
    if any(override.startswith("out=") for override in overrides):
        raise LmgymError(f"{folder} is a run folder and keeps its out=; to begin anew, name {folder / 'recipe.yaml'}")
