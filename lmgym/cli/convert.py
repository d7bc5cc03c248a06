"""`lmgym convert`: print another system's configuration as a recipe."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The system, its file, and how many devices the file is for."""
    systems = ["trl", "open-r1", "verl", "openrlhf", "nemo-rl", "rl4lms"]
    parser.add_argument("system", choices=systems, help="the system of the configuration (unsloth's are trl)")
    kinds = "YAML, a shell script with the command, a Python script with the Config, a notebook"
    parser.add_argument("file", metavar="FILE", help=kinds)
    parser.add_argument("--devices", type=int, metavar="N", help="devices that it runs on, if FILE does not say")


def run(given: argparse.Namespace) -> int:
    """Print the recipe. The exit status is 1 if something has to be filled in before it trains."""
    if given.system == "rl4lms":
        from lmgym.compat.rl4lms.files import printed

        print(printed(Path(given.file)), end="")
        return 0
    from lmgym.compat.settings.files import converted

    recipe, obstacles = converted(given.system, Path(given.file), given.devices)
    print(recipe, end="")
    for obstacle in obstacles:
        print(f"lmgym: to be filled in: {obstacle}", file=sys.stderr)
    return 1 if obstacles else 0
