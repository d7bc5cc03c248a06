"""`lmgym train`: train a recipe, or resume a run folder."""

import argparse
from pathlib import Path

from lmgym.cli.recipes import add_recipe, quick_imports, read_recipe, refuse_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, and overrides."""
    add_recipe(parser)


def run(given: argparse.Namespace) -> int:
    """Train. The exit status is 130 if Ctrl-C stopped it."""
    with quick_imports():
        from lmgym.config.build import check_same_recipe
        from lmgym.config.packaged import find_recipe
        from lmgym.experiments.sweep import is_finished, plan, sweep_folder, train_all
        from lmgym.training.loop import train

    what = Path(given.what)
    recipe = what / "recipe.yaml" if what.is_dir() else find_recipe(given.what)
    # A recipe with `runs:` is several runs; `plan` returns None for a single one.
    several = plan(recipe, given.overrides) if recipe.is_file() else None
    if several and what.is_dir():
        refuse_out(what, given.overrides)
        return train_all(several, what, changed=bool(given.overrides))
    if several:
        return train_all(several, sweep_folder(several, recipe))
    config, folder = read_recipe(given)
    if folder is None and config.out is None:
        config.out = str(_unused(Path("runs") / Path(given.what).stem))
    elif folder is None:
        check_same_recipe(config, given.what)
    train(config)
    return 0 if is_finished(config) else 130


def _unused(folder: Path) -> Path:
    """The folder if it does not exist, else the first of folder-2, folder-3 ... that does not."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
