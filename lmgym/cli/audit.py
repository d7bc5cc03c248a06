"""`lmgym audit`: what the rewards of a recipe pay for, before a run is paid for."""

import argparse

from lmgym.cli.recipes import quick_imports, read_recipe
from lmgym.core.errors import LmgymError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe or a reward with a task, and how much to try."""
    parser.add_argument("what", metavar="RECIPE_OR_REWARD", help="a recipe, a run folder, or the name of a reward")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    parser.add_argument("--task", metavar="NAME", help="the task to audit a reward on; arguments: task.path=...")
    parser.add_argument("--stage", metavar="NAME", help="the stage of a recipe; default: the last one with rewards")
    parser.add_argument("--examples", type=int, default=40, metavar="N", help="examples to try on (default: 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which examples are drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="machine-readable, with every answer that was tried")


def run(given: argparse.Namespace) -> None:
    """Audit, and print what was found. The exit status says nothing about the reward."""
    from lmgym.experiments.audit.asked import is_reward, of_reward
    from lmgym.experiments.audit.audit import audit
    from lmgym.experiments.audit.own_answers import explain_run
    from lmgym.experiments.audit.report import as_json, own_json, print_audit, print_own
    from lmgym.logs.console import Console
    from lmgym.logs.formatting import json_text

    folder = None
    with Console(quiet=given.json) as console:
        if is_reward(given.what, given.task):
            if given.stage is not None:
                raise LmgymError(f"'{given.what}' is a reward, and --stage is about a recipe; leave it out")
            asked = of_reward(given.what, given.task, given.overrides)
        else:
            if given.task is not None:
                raise LmgymError(f"--task is for a reward by its name; of the recipe {given.what} write task.name=...")
            with quick_imports():
                from lmgym.experiments.audit.recipe import of_recipe

            console.doing("reading the data")
            config, folder = read_recipe(given)
            asked = of_recipe(config, given.stage)
        for note in asked.notes:
            console.say(note)
        found = audit(
            asked.rewards, asked.examples, given.examples, given.seed, asked.timeout, asked.tokenizer, asked.room,
            asked.whole, say=console.say, doing=console.doing,
        )  # fmt: skip
        rises = {}
        if folder is not None:
            stages = [one.name for one in config.stages]
            rises = explain_run(folder, None if given.stage is None else stages.index(given.stage))
        if given.json:
            print(json_text(as_json(found) | {"own_answers": own_json(rises)}), end="")
        else:
            print_audit(found, console)
            print_own(rises, console)
