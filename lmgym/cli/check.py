"""`lmgym check`: a dry run of a recipe."""

import argparse

from lmgym.cli.recipes import add_recipe, quick_imports, read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, overrides, and whether to stop before the model is loaded."""
    add_recipe(parser)
    parser.add_argument("--memory", action="store_true", help="only estimate the memory, without loading the model")


def run(given: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 where it found a problem."""
    with quick_imports():
        from lmgym.training.dry_run import check

    config, folder = read_recipe(given)
    return check(config, folder, load=not given.memory)
