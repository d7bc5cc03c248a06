"""How far a reader has to walk through `start`: which files it enters, and how often it comes back to one.

A trace of the calls of one set-up: each call of a function of the package from another file of the package is a step,
once for each pair of functions, in the order in which they first happen. A step into a file that an earlier step has
entered is a return.

    python -m benchmarks.start_walk [RECIPE] [key=value ...] [--files]
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lmgym.config.build import load_config
from lmgym.config.schema import Config
from lmgym.logs.console import Console
from lmgym.training.setup import start

PACKAGE = str(Path(sys.modules["lmgym"].__file__ or "").parent)


def traced(act: Callable[[], Any]) -> list[tuple[str, str]]:
    """The steps of `act` between files of the package: (file that is left, file that is entered)."""
    seen: set[tuple[Any, Any]] = set()
    steps: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        own, caller = frame.f_code, frame.f_back
        if event != "call" or not own.co_filename.startswith(PACKAGE) or own.co_name == "<module>":
            return
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back  # through a library or a decorator
        if caller is None or caller.f_code.co_filename == own.co_filename or (caller.f_code, own) in seen:
            return
        seen.add((caller.f_code, own))
        steps.append((caller.f_code.co_filename, own.co_filename))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(before)
    return steps


def walk(config: Config) -> list[str]:
    """The files that the set-up of a run enters, in order; one that is entered again is there again."""
    with tempfile.TemporaryDirectory() as folder:
        config.out = str(Path(folder) / "run")

        def set_up() -> None:
            run = start(config, Console(quiet=True))
            sys.setprofile(None)
            with run:
                pass

        return [str(Path(entered).relative_to(PACKAGE)) for _, entered in traced(set_up)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--files", action="store_true", help="name the files, and how often each is entered")
    given = parser.parse_args()
    entered = walk(load_config(given.recipe, given.overrides))
    files = dict.fromkeys(entered)
    print(f"{given.recipe}: start enters {len(files)} files, with {len(entered) - len(files)} returns")
    for name in files if given.files else ():
        print(f"{entered.count(name):4} {name}")


if __name__ == "__main__":
    main()
