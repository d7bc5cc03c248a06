"""The run folders behind each line of `lmgym plot`: single runs, and the settings of a folder of several runs."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.logs.writer import METRICS


def plotted_runs(names: Sequence[str]) -> dict[str, list[Path]]:
    """The run folders of each line, by its name. The folder of a single run is a line of its own, under its own name.
    In a folder of several runs (a recipe with `runs:`) those that differ in nothing but the seed are one line: under
    the folder's name, or where there are several settings, under the values of the setting.

    Raises LmgymError for what is no run, and for a folder that is named twice.

    Example: plotted_runs(["runs/sweep"]) -> {"group_size-4": [runs/sweep/group_size-4,seed-0, ...], ...}
    """
    lines: dict[str, list[Path]] = {}
    for name in names:
        folder = Path(name)
        found = {folder.name: [folder]} if (folder / METRICS).is_file() else _settings(folder)
        several = len(found) > 1 and len(names) > 1
        for setting, runs in found.items():
            label = f"{folder.name}: {setting}" if several else setting
            label = label if label not in lines else f"{folder}: {setting}" if len(found) > 1 else str(folder)
            if label in lines:
                raise LmgymError(f"{folder} is named twice; name each run once")
            lines[label] = runs
    return lines


def _settings(folder: Path) -> dict[str, list[Path]]:
    """The runs in a folder of several, by setting."""
    members = sorted(path.parent for path in folder.glob(f"*/{METRICS}"))
    if not members:
        what = f"has no {METRICS} and no runs in it" if folder.is_dir() else "is not there"
        raise LmgymError(f"{folder} {what}; name the folder of a run, or of the runs of a recipe with `runs:`")
    groups: dict[str, list[Path]] = {}
    for member in members:
        groups.setdefault(_apart_from_seed(read_yaml(member / "recipe.yaml")), []).append(member)
    if len(groups) == 1:
        return {folder.name: members}
    return {_without_seed(runs[0].name): runs for runs in groups.values()}


def _apart_from_seed(recipe: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in recipe.items() if key not in ("seed", "out")}, default=str)


def _without_seed(label: str) -> str:
    """The label of a setting, from that of one of its runs.

    Example:
        >>> _without_seed("group_size-4,seed-0")
        'group_size-4'
    """
    return re.sub(r",seed-[^,]+$", "", label)
