"""`lmgym check`: a dry run of a recipe."""

import argparse

from lmgym.cli.recipes import add_recipe, next_command, quick_imports, read_recipe
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a run folder, overrides, an option to load no model, and how many processes will train."""
    add_recipe(parser)
    parser.add_argument("--memory", action="store_true", help="only estimate the memory, without loading the model")
    ranks = "the run will be trained by N processes (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)


def run(given: argparse.Namespace) -> int:
    """Print the report, and what to do next. The exit status is 1 if it found a problem."""
    with quick_imports():
        from lmgym.training.dry_run import check

    config, folder = read_recipe(given)
    if given.ranks < 1:
        raise LmgymError(f"--ranks is {given.ranks}; it must be at least 1")
    status = check(config, folder, load=not given.memory, ranks=given.ranks)
    verb = "check" if status or given.memory else "train"
    command = next_command(verb, given) + (f" --ranks {given.ranks}" if given.ranks > 1 else "")
    print(f"next: mend what is marked with !, and check again: {command}" if status else f"next: {command}")
    return status
