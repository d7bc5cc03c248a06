"""`lmgym doctor`: what is wrong with a run, worst first, and what to do about it."""

import argparse
import sys
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.output import columns_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run, the format, and where to draw."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, finished or not")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--out", metavar="FILE.png", help="where to draw the findings; default: doctor.png in the run")


def run(given: argparse.Namespace) -> None:
    """Print the findings, and draw the worst of them."""
    from lmgym.config.yaml import read_yaml
    from lmgym.core.visible import visible
    from lmgym.logs.doctor.examine import examine
    from lmgym.logs.doctor.report import report
    from lmgym.logs.formatting import json_text
    from lmgym.logs.run_folders import run_folder

    folder = run_folder(given.run_folder)
    if given.out and Path(given.out).suffix.lower() != ".png":
        raise LmgymError(f"--out is {given.out}; its name must end in .png")
    diagnosis = examine(folder, read_yaml(folder / "recipe.yaml"))
    # A picture that cannot be written, as in somebody else's folder, is no reason to keep the findings back.
    picture, why = None, ""
    if diagnosis.findings:
        from lmgym.logs.doctor.picture import doctor_picture

        try:
            picture = doctor_picture(diagnosis, Path(given.out or folder / "doctor.png"))
        except LmgymError as error:
            why = str(error)
    if given.json:
        tree = diagnosis.as_json() | {"picture": None if picture is None else str(picture)}
        print(json_text(tree), end="")
        return
    for line in report(diagnosis, columns_of(sys.stdout)):
        print(visible(line))
    if picture:
        print(f"\npicture: {visible(str(picture))}")
    elif why:
        print(f"\nno picture: {visible(why)}; name another file by --out")
