"""`lmgym eval`: evaluate a run's newest model, one of its checkpoints, or another model as a recipe says."""

import argparse
import sys

from lmgym.cli.recipes import add_model, quick_imports, read_model, shown
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, how many answers, and the format."""
    add_model(parser)
    answers = "answers to each prompt; with several, pass@k for k = 1, 2, 4 ... N"
    parser.add_argument("--samples", type=int, metavar="N", help=answers)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(given: argparse.Namespace) -> None:
    """Print each metric with its interval, and write them beside the run."""
    with quick_imports():
        from lmgym.experiments.evaluations import evaluate_model
        from lmgym.logs.console import Console

    # A recipe whose evaluation.best_of is set here is read with --samples, since it is refused for one answer.
    picks = any(override.startswith("evaluation.best_of=") for override in given.overrides)
    several = [f"evaluation.samples={given.samples}"] if picks and given.samples is not None else []
    named = read_model(argparse.Namespace(**{**vars(given), "overrides": [*several, *given.overrides]}))
    with Console(quiet=given.json) as console:
        record = evaluate_model(named, console, given.samples, shown(given), given.overrides)
        rows = [(name, str(interval)) for name, interval in record.metrics.items()]
        console.table("mean [95% interval]", ("metric", record.split), rows)
        if given.json:
            print(record.text(), end="")
        if named.run is not None:
            try:
                console.say(f"written to {record.write(named.run)}")
            except LmgymError as error:  # a run of someone else's; the result has been printed
                print(f"lmgym: the result is not kept: {error}", file=sys.stderr)
