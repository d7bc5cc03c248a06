"""`lmgym bisect`: when a metric of a run changed and what changed with it, or where two runs part."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One run and a metric, or two runs."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, finished or not")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="another run: where do the two part?")
    parser.add_argument("--metric", default="reward", help="a key of metrics.jsonl (docs/metrics.md); default: reward")
    parser.add_argument("--stage", metavar="NAME", help="the stage of a single run; default: the last")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(given: argparse.Namespace) -> None:
    """Print the change, or the parting."""
    from dataclasses import asdict

    from lmgym.experiments.bisect.change import find_change
    from lmgym.experiments.bisect.parting import find_parting
    from lmgym.experiments.bisect.report import change_sentences, parting_sentences
    from lmgym.logs.console import Console
    from lmgym.logs.formatting import json_text
    from lmgym.logs.run_folders import run_folder

    folder = run_folder(given.run_folder)
    if given.other:
        other = run_folder(given.other)
        parting = find_parting(folder, other)
        tree: Any = asdict(parting)
        sentences = [*parting_sentences(folder, other, parting)]
    else:
        change = find_change(folder, given.metric, given.stage)
        tree = None if change is None else asdict(change) | {"findings": [one.as_json() for one in change.findings]}
        sentences = [*change_sentences(folder, given.metric, change)]
    if given.json:
        print(json_text(None if tree is None else {**tree, "said": sentences}), end="")
        return
    with Console() as console:
        for sentence in sentences:
            console.say(sentence)
