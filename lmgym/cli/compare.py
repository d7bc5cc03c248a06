"""`lmgym compare`: two models on the same examples, compared prompt by prompt."""

import argparse
from pathlib import Path

from lmgym.cli.recipes import quick_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two models, and how to compare them."""
    for name in ("first", "second"):
        kinds = "a run, a model folder (a checkpoint, best, final), a recipe, a built-in model or a Hub id"
        parser.add_argument(name, metavar={"first": "A", "second": "B"}[name], help=kinds)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of both recipes")
    parser.add_argument("--split", help="the examples to compare on; default: the recipe's final_split or split")
    parser.add_argument("--metric", help="show the examples that differ most in it; default: the task's first")
    parser.add_argument("--json", metavar="FILE", help="write everything, each example included, to this file")


def run(given: argparse.Namespace) -> None:
    """Print the paired differences; with --json write them all to a file."""
    with quick_imports():
        from lmgym.experiments.compare import compare_models, print_comparison
        from lmgym.logs.console import Console
        from lmgym.logs.writer import disk_errors

    with Console() as console:
        result = compare_models(given.first, given.second, given.overrides, given.split, given.metric, console)
        if given.json:
            with disk_errors(Path(given.json)):
                Path(given.json).write_text(result.text(), encoding="utf-8")
        print_comparison(result, console)
