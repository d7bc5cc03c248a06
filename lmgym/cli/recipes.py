"""What commands share: the recipe or run folder that they name, and quick imports."""

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmgym.core.errors import LmgymError

if TYPE_CHECKING:
    from lmgym.config.schema import Config


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and transformers in a fifth less time: without looking for garbage among new classes and functions.

    Example:
        >>> with quick_imports():
        ...     from lmgym.training.loop import train
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def add_recipe(parser: argparse.ArgumentParser, what: str = "recipe or run") -> None:
    """The arguments `what` (a recipe or a run folder) and `key=value`."""
    parser.add_argument("what", metavar=what.upper().replace(" ", "_"), help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


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


def refuse_out(folder: Path, overrides: Sequence[str]) -> None:
    """Raise LmgymError for `out=` together with a run folder, which cannot move."""
    if any(override.startswith("out=") for override in overrides):
        raise LmgymError(f"{folder} is a run folder and keeps its out=; to begin anew, name {folder / 'recipe.yaml'}")
