"""`lmgym compare`: two models on the same examples, prompt by prompt; or two groups of finished runs, seed by seed."""

import argparse
from pathlib import Path

from lmgym.cli.recipes import quick_imports
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two models or two groups of runs, and how to compare them."""
    for name in ("first", "second"):
        kinds = (
            "a run, a model folder (a checkpoint, best, final), a recipe, a built-in model or a Hub id; or several "
            "seeds: a folder of runs, or a glob in quotes, such as 'runs/a-*'"
        )
        parser.add_argument(name, metavar={"first": "A", "second": "B"}[name], help=kinds)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of both recipes")
    parser.add_argument("--split", help="the examples to compare on; default: the recipe's final_split or split")
    parser.add_argument("--metric", help="show the examples that differ most in it; default: the task's first")
    parser.add_argument("--judge", help='win rates by a judge of pairs, such as "judge_pairs: {model: FOLDER}"')
    parser.add_argument("--json", metavar="FILE", help="write everything, each example included, to this file")


def run(given: argparse.Namespace) -> None:
    """Print the paired differences; with --json write them all to a file."""
    from lmgym.experiments.seed_groups import seed_group

    if folders := [word for word in given.overrides if "=" not in word]:
        raise LmgymError(
            f"compare takes two names, and there is {folders[0]} too; put a glob in quotes, so that the shell leaves "
            "it: lmgym compare 'runs/a-*' 'runs/b-*'"
        )
    names = (given.first, given.second)
    groups = [seed_group(name) for name in names]
    if None in groups and any(groups):
        one, several = names if groups[0] is None else reversed(names)
        raise LmgymError(
            f"{several} is several runs and {one} is one; compare two groups of seeds, or one run with another"
        )
    if all(groups) and given.overrides:
        raise LmgymError(f"{given.overrides[0]} would change nothing: of several seeds the finished runs are compared")
    if all(groups) and given.judge:
        raise LmgymError("--judge compares answers, and of several seeds only the figures are kept; compare two runs")
    with quick_imports():
        from lmgym.experiments.compare import Comparison, compare_models, print_comparison
        from lmgym.experiments.compare_seeds import SeedComparison, compare_groups, print_seed_comparison
        from lmgym.logs.console import Console
        from lmgym.logs.writer import disk_errors

    with Console() as console:
        result: Comparison | SeedComparison
        if groups[0] and groups[1]:
            result = compare_groups(*names, (groups[0], groups[1]), given.split, given.metric)
        else:
            result = compare_models(*names, given.overrides, given.split, given.metric, console, given.judge)
        if given.json:
            with disk_errors(Path(given.json)):
                Path(given.json).write_text(result.text(), encoding="utf-8")
        if isinstance(result, SeedComparison):
            print_seed_comparison(result, console)
        else:
            print_comparison(result, console)
