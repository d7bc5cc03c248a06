"""`lmgym what-if`: one step of a run again, under a changed recipe."""

import argparse

from lmgym.cli.recipes import quick_imports
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run, what is changed, and which step."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    what = "what to change: keys of algorithm, rewards and optimizer; with --try those of sampling too"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=what)
    step = "the step, counted from 1; default: the last one that a checkpoint stands right before"
    parser.add_argument("--step", metavar="N", type=int, help=step)
    several = "really take so many steps under both recipes, with the same seeds, and compare the curves"
    parser.add_argument("--try", dest="count", metavar="N", type=int, help=several)
    parser.add_argument("--stage", metavar="NAME", help="the stage; default: the last")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(given: argparse.Namespace) -> None:
    """Take the step again, as it was and as it is asked about, and print what differs."""
    from lmgym.logs.run_folders import run_folder

    folder = run_folder(given.run_folder)
    if words := [word for word in given.overrides if "=" not in word]:
        raise LmgymError(f"what-if takes one run, and there is {words[0]} too; write changes as key=value")
    with quick_imports():
        from lmgym.experiments.what_if.question import ask
        from lmgym.experiments.what_if.report import as_json, print_what_if
        from lmgym.experiments.what_if.trial import print_trial, trial_json, try_steps
        from lmgym.experiments.what_if.what_if import what_if
        from lmgym.logs.console import Console
        from lmgym.logs.formatting import json_text

    with Console(quiet=given.json) as console:
        step = None if given.step is None else given.step - 1
        question = ask(folder, given.overrides, given.stage, samples=given.count is not None)
        if given.count is not None:
            trial = try_steps(question, step, given.count, console)
            print_trial(trial, console)
        else:
            result = what_if(question, step, console)
            print_what_if(result, console)
    if given.json:
        print(json_text(as_json(result) if given.count is None else trial_json(trial)), end="")
