"""`lmgym init`: write a small project, with a task and a reward of its own, that trains at once."""

import argparse
import shlex
from importlib import resources
from pathlib import Path

from lmgym.core.errors import LmgymError

NEXT = """{folder} has a task, a reward, a recipe and tests. Next:

  cd {folder}
  lmgym train recipe.yaml       half a minute on two CPU cores
  pytest                        tests the task and the reward (pip install pytest)

Then change task.py and reward.py, and name your own model in recipe.yaml."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument("folder", metavar="FOLDER", help="the project's folder: a new or an empty one")


def run(given: argparse.Namespace) -> None:
    """Write the files and say what comes next."""
    folder = Path(given.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LmgymError(f"{folder} is not empty; name a new folder, such as {folder}-2")
        # A file of Python ends in .txt there, since it is no part of lmgym.
        for file in (resources.files("lmgym.cli") / "project").iterdir():
            text = file.read_text(encoding="utf-8").replace("{name}", folder.absolute().name)
            (folder / file.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise LmgymError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    print(NEXT.format(folder=shlex.quote(str(folder))))
