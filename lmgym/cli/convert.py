"""`lmgym convert`: print another system's configuration as a recipe."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The system and its file."""
    parser.add_argument("system", choices=["rl4lms"], help="the system of the configuration")
    parser.add_argument("file", metavar="FILE", help="the configuration, a YAML file")


def run(given: argparse.Namespace) -> None:
    """Print the recipe."""
    from lmgym.compat.rl4lms.files import printed

    print(printed(Path(given.file)), end="")
