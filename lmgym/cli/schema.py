"""`lmgym schema`: the JSON Schema of a recipe, for editors."""

import argparse

from lmgym.cli.recipes import quick_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Plug-ins whose names the schema shall know too."""
    parser.add_argument("--plugin", action="append", default=[], help="a module or .py file to load first")


def run(given: argparse.Namespace) -> None:
    """Print the schema."""
    with quick_imports():
        from lmgym.config.json_schema import recipe_schema, written
        from lmgym.core import registry
        from lmgym.experiments.sweep import Runs

    for plugin in given.plugin:
        registry.load_plugin(plugin)
    print(written(recipe_schema(registry.names, Runs)))
