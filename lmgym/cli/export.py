"""`lmgym export`: write a trained model to a folder for sharing, with its tokenizer and a model card."""

import argparse
from pathlib import Path

from lmgym.cli.recipes import quick_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run or one of its model folders, and where to write."""
    parser.add_argument("what", metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints/, best or final")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into the weights of their base model")
    parser.add_argument("--bf16", action="store_true", help="in half the size, rounded so that what was learnt stays")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload it to the Hub, as a new private repository")


def run(given: argparse.Namespace) -> None:
    """Write the model and print its folder."""
    with quick_imports():
        from lmgym.training.model_card import export

    print(export(Path(given.what), Path(given.to), given.overrides, given.merge, given.push, given.bf16))
