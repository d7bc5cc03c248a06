"""`lmgym recipes`: the recipes that come with lmgym."""

import argparse
import json
import sys

from lmgym.config.packaged import described, packaged_recipes
from lmgym.core.errors import LmgymError
from lmgym.core.output import rich_settings, styled
from lmgym.core.registry import suggest

WIDE = 200  # columns where nobody looks: each recipe stays on a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe, and the format."""
    parser.add_argument("name", nargs="?", help="print this recipe, as the beginning of your own")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(given: argparse.Namespace) -> None:
    """Print the table of recipes, or one of them."""
    packaged = packaged_recipes()
    if given.name is not None:
        if given.name not in packaged:
            raise LmgymError(f"no recipe {given.name} comes with lmgym; {suggest(given.name, packaged)}")
        print(packaged[given.name].read_text(encoding="utf-8"), end="")
        return
    recipes = [described(name, path) for name, path in packaged.items()]
    recipes.sort(key=lambda recipe: not recipe.needs.startswith("CPU"))  # first what runs anywhere
    if given.json:
        rows = [{"name": recipe.name, "about": recipe.about, "needs": recipe.needs} for recipe in recipes]
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it does", "what it needs", box=None, pad_edge=False)
    for recipe in recipes:
        table.add_row(recipe.name, recipe.about, recipe.needs)
    console = Console(file=sys.stdout, **rich_settings() | ({} if sys.stdout.isatty() else {"width": WIDE}))
    with console.capture() as capture:
        console.print(table)
    styled(sys.stdout).write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    print(
        "\nMinutes are those of two CPU cores. `lmgym train NAME` trains one; `lmgym recipes NAME > my.yaml` copies it."
    )
