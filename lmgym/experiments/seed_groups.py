"""The runs behind one side of `lmgym compare A B` where A and B are several seeds of a recipe: a folder, or a glob."""

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.core.files import read_json
from lmgym.logs.records import rename_evaluations
from lmgym.logs.run_folders import runs_in
from lmgym.logs.run_state import is_locked

APART = ("seed", "out")  # what the runs of a group may differ in


def seed_group(name: str) -> dict[int, Path] | None:
    """The run folders that `name` means, by seed; None if it is a single run or a model.

    A group is a folder of several runs (a recipe with `runs:`), or a glob that matches runs or such folders. Raises
    LmgymError for a glob that matches no run, for runs that differ in more than the seed, for two runs of one seed, and
    for a run that is not finished.

    Example: seed_group("runs/sweep/group_size-4,seed-*") -> {0: Path("runs/sweep/group_size-4,seed-0"), ...}"""
    folder, is_glob = Path(name), glob.has_magic(name) and not Path(name).exists()
    if not is_glob and runs_in(folder) in ([], [folder]):
        return None
    runs = [run for match in (sorted(glob.glob(name)) if is_glob else [name]) for run in runs_in(Path(match))]
    if not runs:
        raise LmgymError(f"{name} matches no run; name folders of runs, such as 'runs/quickstart-*'")
    recipes = [read_yaml(run / "recipe.yaml") for run in runs]
    _check_one_setting(name, runs, recipes)
    found: dict[int, Path] = {}
    for run, recipe in zip(runs, recipes, strict=True):
        if (seed := recipe.get("seed", 0)) in found:
            raise LmgymError(f"{name}: {found[seed]} and {run} both have seed {seed}; a seed counts once")
        if not _is_finished(run, recipe):
            raise LmgymError(f"{run} is not finished; go on with `lmgym train {run}`, or leave it out by a glob")
        found[seed] = run
    return found


def common_seeds(first: dict[int, Path], second: dict[int, Path]) -> tuple[list[int], list[str]]:
    """The seeds of both groups, and a sentence about each that only one has. Raises LmgymError for less than two."""
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        have = " and ".join(", ".join(map(str, sorted(group))) for group in (first, second))
        raise LmgymError(
            f"a comparison is of the same seeds, at least two, and the seeds are {have}; train the missing ones with "
            "runs.seeds=[0,1,2], or compare two single runs prompt by prompt"
        )
    notes = [
        f"seed {seed} is left out: only {letter} has it"
        for letter, group, other in (("A", first, second), ("B", second, first))
        for seed in sorted(group.keys() - other.keys())
    ]
    return common, notes


def _is_finished(run: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether the summary of a run is about the last step of its recipe, or about an early stop: a run that is trained
    further keeps the summary of before until it ends."""
    try:
        last, summary = recipe["stages"][-1], rename_evaluations(read_json(run / "summary.json"))
        ended = summary["after"]["step"] >= last["steps"] or summary.get("stop") is not None
        return ended and summary["after"].get("stage") in (None, last["name"]) and not is_locked(run / ".lock")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _check_one_setting(name: str, runs: Sequence[Path], recipes: Sequence[dict[str, Any]]) -> None:
    """Raise LmgymError, with a key and a glob, unless all recipes are equal but for the seed."""
    for run, recipe in zip(runs, recipes, strict=True):
        here, first = (dict(_flat({k: v for k, v in tree.items() if k not in APART})) for tree in (recipe, recipes[0]))
        keys = [key for key in {**first, **here} if first.get(key) != here.get(key)]
        if keys:
            one, other = (path.parent / re.sub("(.*seed-).*", r"\1*", path.name) for path in (run, runs[0]))
            remedy = f"name the runs of one of them, such as '{one}'"
            if one == other:  # one was trained further, and no name tells them apart
                remedy = "train both with the same recipe, or leave one out by a glob"
            raise LmgymError(
                f"{name} holds different settings: {runs[0].name} and {run.name} differ in {keys[0]}; {remedy}"
            )


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The values of a recipe as text, by dotted key; a stage's keys under its name."""
    if isinstance(tree, list) and all(isinstance(item, dict) for item in tree):
        tree = {item.get("name", number): item for number, item in enumerate(tree)}
    if not isinstance(tree, dict):
        yield path.lstrip("."), json.dumps(tree, default=str)
        return
    for key, value in tree.items():
        yield from _flat(value, f"{path}.{key}")
