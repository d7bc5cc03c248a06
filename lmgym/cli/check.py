"""`lmgym check`: a dry run of a recipe."""

import argparse

from lmgym.cli.recipes import add_recipe, next_command, quick_imports, read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, overrides, and an option to load no model."""
    add_recipe(parser)
    parser.add_argument("--memory", action="store_true", help="only estimate the memory, without loading the model")


def run(given: argparse.Namespace) -> int:
    """Print the report, and what to do next. The exit status is 1 if it found a problem."""
    with quick_imports():
        from lmgym.training.dry_run import check

    config, folder = read_recipe(given)
    status = check(config, folder, load=not given.memory)
    if status:
        print(f"next: mend what is marked with !, and check again: {next_command('check', given)}")
    elif given.memory:
        print(f"next: {next_command('check', given)}")
    else:
        print(f"next: {next_command('train', given)}")
    return status
