"""`lmgym why`: what moved an answer during training."""

import argparse

from lmgym.cli.recipes import quick_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run, an answer, and perhaps a step."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--example", metavar="ID", help="an example of the run's data; default: the first held-out one")
    prompt = "another prompt, in place of the last message of the example's"
    parser.add_argument("--prompt", metavar="TEXT", help=prompt)
    parser.add_argument("--answer", metavar="TEXT", help="the answer; default: the example's first reference")
    token = "one token of the answer, counted from 1; default: all of them"
    parser.add_argument("--token", metavar="N", type=int, help=token)
    step = "the step to split into groups, counted from 1; default: where the answer changed most"
    parser.add_argument("--step", metavar="N", type=int, help=step)
    parser.add_argument("--stage", metavar="NAME", help="the stage; default: the last")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(given: argparse.Namespace) -> None:
    """Print the answer over the checkpoints, and the groups of a step that moved it."""
    from lmgym.logs.run_folders import run_folder

    folder = run_folder(given.run_folder)
    with quick_imports():
        from lmgym.experiments.what_if.question import ask
        from lmgym.experiments.why.report import as_json, print_why
        from lmgym.experiments.why.why import why
        from lmgym.logs.console import Console
        from lmgym.logs.formatting import json_text

    step = None if given.step is None else given.step - 1
    with Console(quiet=given.json) as console:
        question = ask(folder, [], given.stage)
        found = why(question, given.example, given.prompt, given.answer, step, given.token, console)
        if given.json:
            print(json_text(as_json(found)), end="")
        else:
            print_why(found, console)
