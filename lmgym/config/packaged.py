"""The recipes that come with lmgym, by name: the files of the folder lmgym/recipes."""

import os
from dataclasses import dataclass
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest

FOLDER = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class PackagedRecipe:
    """One row of `lmgym recipes`.

    Example: PackagedRecipe("frozen_lake", Path("...yaml"), "A tiny GPT-2 finds its way", "CPU, 1 minute")"""

    name: str
    path: Path
    about: str
    needs: str


def packaged_recipes() -> dict[str, Path]:
    """The file of each recipe that comes with lmgym, by name.

    Example: packaged_recipes()["quickstart"] -> Path(".../lmgym/recipes/quickstart.yaml")"""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def described(name: str, path: Path) -> PackagedRecipe:
    """What a packaged recipe says of itself on lines 2 and 3: `# About: ...` and `# Needs: ...`."""
    with path.open(encoding="utf-8") as file:
        lines = [line.strip() for _, line in zip(range(3), file, strict=False)]
    return PackagedRecipe(name, path, *(line.partition(": ")[2].rstrip(".") for line in lines[1:]))


def find_recipe(name: str | Path) -> Path:
    """The file that `name` means: what has this path, or the packaged recipe of this name.

    Raises LmgymError for a name without a folder and an ending that is neither. Other paths are returned as they are:
    whoever reads the file says what is wrong with it.

    Example: find_recipe("quickstart"), find_recipe("my/recipe.yaml")"""
    path, packaged = Path(name), packaged_recipes()
    if os.path.exists(path):
        return path
    if str(name) in packaged:
        return packaged[str(name)]
    if path.suffix not in (".yaml", ".yml") and path.name == str(name):
        raise LmgymError(f"there is no recipe {name}, here or among those of lmgym; {suggest(str(name), packaged)}")
    if path.stem in packaged:
        raise LmgymError(f"there is no recipe {path}; the one that comes with lmgym is named {path.stem}")
    return path


def hides_packaged(name: str) -> bool:
    """True if a file or folder of this name keeps `find_recipe` from the packaged recipe of the same name."""
    return name in packaged_recipes() and os.path.exists(name)
