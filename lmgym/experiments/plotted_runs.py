"""The run folders behind each line of `lmgym plot`: single runs, and the settings of a folder of several runs."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.logs.records import METRICS
from lmgym.logs.run_folders import is_run, runs_in


def plotted_runs(names: Sequence[str]) -> dict[str, list[Path]]:
    """The run folders of each line, by its name. Runs whose recipes differ in nothing but the seed are one line,
    wherever they lie, unless two of them have the same seed: single runs under what their names begin with; those in a
    folder of several (a recipe with `runs:`) under the folder's name, or where there are several settings, under the
    values of the setting. Any other run is a line of its own, under its own name.

    Raises LmgymError for what is no run, and for a folder that is named twice.

    Example: plotted_runs(["runs/sweep"]) -> {"group_size-4": [runs/sweep/group_size-4,seed-0, ...], ...}"""
    lines: dict[str, list[Path]] = {}
    for name in names:
        folder = Path(name)
        found = {folder.name: [folder]} if is_run(folder) else _settings(folder)
        several = len(found) > 1 and len(names) > 1
        for setting, runs in found.items():
            label = f"{folder.name}: {setting}" if several else setting
            label = label if label not in lines else f"{folder}: {setting}" if len(found) > 1 else str(folder)
            if label in lines:
                raise LmgymError(f"{folder} is named twice; name each run once")
            lines[label] = runs
    return _joined(lines)


def _joined(lines: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """The lines, with those joined into one whose runs are different seeds of one recipe."""
    alike: dict[str, list[str]] = {}
    for name, runs in lines.items():
        alike.setdefault(_apart_from_seed(recipe) if (recipe := _recipe(runs[0])) else name, []).append(name)
    joined, order = dict[str, list[Path]](), list(lines)
    for names in alike.values():
        runs = [run for name in names for run in lines[name]]
        seeds = [_recipe(run).get("seed") for run in runs]
        if len(names) == 1 or len(set(seeds)) < len(seeds):
            joined |= {name: lines[name] for name in names}
            continue
        label = _beginning(names)
        label = ", ".join(names) if label in {*lines, *joined}.difference(names) else label
        joined[label] = runs
        order[order.index(names[0])] = label
    return {name: joined[name] for name in order if name in joined}


def _recipe(run: Path) -> dict[str, Any]:
    """A run's recipe; empty for a folder that has none."""
    path = run / "recipe.yaml"
    return read_yaml(path) if path.is_file() else {}


def _beginning(names: Sequence[str]) -> str:
    """What the names of several seeds have in common at their beginning, or else all of them.

    Example:
        >>> _beginning(["quickstart-seed-0", "quickstart-seed-1"]), _beginning(["a", "b"])
        ('quickstart', 'a, b')
    """
    common = names[0]
    while not all(name.startswith(common) for name in names):
        common = common[:-1]
    return re.sub(r"[-_,. ]*(seed)?[-_,. ]*[0-9]*$", "", common) or ", ".join(names)


def _settings(folder: Path) -> dict[str, list[Path]]:
    """The runs in a folder of several, by setting."""
    members = runs_in(folder)
    if not members:
        what = f"has no {METRICS} and no runs in it" if folder.is_dir() else "is not there"
        raise LmgymError(f"{folder} {what}; name the folder of a run, or of the runs of a recipe with `runs:`")
    groups: dict[str, list[Path]] = {}
    for member in members:
        groups.setdefault(_apart_from_seed(read_yaml(member / "recipe.yaml")), []).append(member)
    if len(groups) == 1:
        return {folder.name: members}
    labels = [_label([run.name for run in runs]) for runs in groups.values()]
    return {
        label if labels.count(label) == 1 else ", ".join(run.name for run in runs): runs
        for label, runs in zip(labels, groups.values(), strict=True)
    }


def _label(names: Sequence[str]) -> str:
    """What the folders of the seeds of a setting have in common.

    Example:
        >>> _label(["size-4,seed-0", "size-4,seed-1"]), _label(["seed-1", "seed-2"]), _label(["a-seed-0", "a-seed-1"])
        ('size-4', 'seed-1, seed-2', 'a')
    """
    settings = {_without_seed(name) for name in names}
    return settings.pop() if len(settings) == 1 else _beginning(names)


def _apart_from_seed(recipe: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in recipe.items() if key not in ("seed", "out")}, default=str)


def _without_seed(label: str) -> str:
    """The label of a setting, from that of one of its runs.

    Example:
        >>> _without_seed("group_size-4,seed-0")
        'group_size-4'
    """
    return re.sub(r",seed-[^,]+$", "", label)
