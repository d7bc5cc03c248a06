"""`lmgym convert SYSTEM FILE`: the file is read, a recipe is filled in from the system's table, and printed."""

from importlib import import_module
from pathlib import Path
from typing import Any

from lmgym.compat.settings.read import read
from lmgym.compat.settings.recipe import Draft, text
from lmgym.config.yaml import merge, read_yaml

SYSTEMS = {
    "trl": "trl",
    "open-r1": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "nemo-rl": "nemo_rl",
}  # their modules


def converted(system: str, path: Path, devices: int | None = None) -> tuple[str, list[str]]:
    """The recipe of a file as YAML, and what has to be filled in before it trains. Raises LmgymError for a file that
    cannot be read.

    Example: converted("verl", Path("run_qwen2-7b.sh"))[1] -> []
    """
    module = import_module(f"lmgym.compat.settings.{SYSTEMS[system]}")
    table: dict[str, Any] = read_yaml(Path(__file__).parent / "tables" / f"{SYSTEMS[system].replace('_', '-')}.yaml")
    if system == "open-r1":
        table = merge(table, read_yaml(Path(__file__).parent / "tables" / "open-r1.yaml"))
    draft = Draft(system, read(path), path, devices)
    module.fill(draft, table)
    draft.fit()
    lost, idle = draft.leftovers(table)
    draft.check()
    return text(draft, lost, idle), draft.obstacles
