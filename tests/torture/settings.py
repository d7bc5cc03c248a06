"""Mutants of public configuration files: `lmgym convert` makes a recipe of each, or says in one sentence why not.

    python -m tests.torture.settings FOLDER --count 5000 --seed 1

FOLDER has a folder for each system (trl, open-r1, verl, openrlhf, nemo-rl) with files of its repository, in which the
mutants are written too. Without FOLDER the samples of tests/compat/test_settings.py are taken.
"""

import argparse
import collections
import json
import random
import re
import shutil
import signal
import tempfile
import traceback
from pathlib import Path
from typing import Any

import yaml

from lmgym.compat.settings.files import SYSTEMS, converted
from lmgym.core.errors import LmgymError
from tests.compat.test_settings import FILES, NEMO_BASE
from tests.torture.damage import change_bytes, change_tree

LIMIT = 20  # seconds
ENDINGS = (".yaml", ".yml", ".sh", ".py", ".ipynb")
VALUES = ["nan", "-1", "null", "[]", "{a: 1}", "'", "$X", "$((9**9**9))", "default", "<<EOF", "\\", "${a.b}", "(", "!!"]
VALUES += ["1e999", "0", "true", "9" * 400, "(" * 300, "[" * 300, "a.b.c=d", "--", "--x", "*", "{", '"', "lambda: 0"]


def damaged(dice: random.Random, path: Path) -> bytes:
    """A file with one to four changes: of its bytes, of words behind = and :, of its lines, or of its tree."""
    content = path.read_bytes()
    for _ in range(dice.choice([1, 1, 2, 4])):
        way = dice.random()
        if way < 0.25:
            content = change_bytes(dice, content)[1]
        elif way < 0.45 and path.suffix in (".yaml", ".yml", ".ipynb"):
            content = _changed_tree(dice, content)
        else:
            content = _changed_line(dice, content)
    return content


def _changed_tree(dice: random.Random, content: bytes) -> bytes:
    try:
        tree = yaml.safe_load(content)
        change_tree(dice, tree, yaml=True)
        return yaml.dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, TypeError, IndexError, ValueError):  # an earlier change
        return content


def _changed_line(dice: random.Random, content: bytes) -> bytes:
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    row, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(6):
        case 0:
            del lines[row]
        case 1:
            lines.insert(row, lines[other])
        case 2:
            lines[row], lines[other] = lines[other], lines[row]
        case 3:
            place = dice.randrange(len(lines[row]) + 1)
            lines[row] = lines[row][:place] + dice.choice(VALUES) + lines[row][place:]
        case _:
            lines[row] = re.sub(r"([=:] ?)(\S+)", lambda found: found[1] + dice.choice(VALUES), lines[row])
    return "\n".join(lines).encode("utf-8", "surrogateescape")


class Slow(Exception):
    """A file that took longer than LIMIT."""


def outcome(system: str, path: Path, devices: int | None = None) -> tuple[str, str]:
    """What became of a file: a recipe (whole, or with something to be filled in), a sentence, or a failure."""

    def late(*_: Any) -> None:
        raise Slow(f"more than {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        text, obstacles = converted(system, path, devices)
        if not isinstance(yaml.safe_load(text), dict):
            return "failure", "what was printed is no recipe"
        return ("to be filled in" if obstacles else "recipe"), ""
    except LmgymError as error:
        return ("failure", f"not one sentence: {error}") if "\n" in str(error) else ("sentence", str(error))
    except Exception:
        return "failure", traceback.format_exc()
    finally:
        signal.alarm(0)


def public(folder: Path) -> list[tuple[str, Path]]:
    """The files of each system in which something can be read."""
    files = [(one, path) for one in SYSTEMS for path in sorted((folder / one).rglob("*")) if path.suffix in ENDINGS]
    return [(system, path) for system, path in files if path.is_file() and not path.stem.endswith("-mutant")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.settings", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    folder = Path(given.folder or tempfile.mkdtemp())
    if given.folder is None:
        for system, (name, text) in FILES.items():
            (folder / system).mkdir()
            (folder / system / name).write_text(text)
        (folder / "nemo-rl" / "base.yaml").write_text(NEMO_BASE)
    # 1. The files as they are; those that hold no settings at all are not mutated.
    found: collections.Counter[str] = collections.Counter()
    usable = []
    for system, path in public(folder):
        what, why = outcome(system, path)
        found[what] += 1
        if what == "failure":
            print(f"{path}: {why}", flush=True)
        elif what != "sentence":
            usable.append((system, path))
    print(f"files: {json.dumps(found)}", flush=True)
    # 2. Mutants, each beside its file, since files name their neighbours.
    found.clear()
    for number in range(given.count):
        dice = random.Random(f"{given.seed}/{number}")
        system, path = dice.choice(usable)
        mutant = path.with_name(f"{path.stem}-mutant{path.suffix}")
        mutant.write_bytes(damaged(dice, path))
        what, why = outcome(system, mutant, dice.choice([None, None, 8]))
        found[what] += 1
        if what == "failure":
            kept = folder / f"failure-{given.seed}-{number}{path.suffix}"
            shutil.move(mutant, kept)
            print(f"mutant {number} of {path} ({system}), kept as {kept}: {why}", flush=True)
        else:
            mutant.unlink()
        if number % 500 == 499:
            print(f"{number + 1} mutants: {json.dumps(found)}", flush=True)
    if given.folder is None:
        shutil.rmtree(folder)
    print(f"mutants: {json.dumps(found)}", flush=True)
    return 1 if found["failure"] else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
