"""`lmgym convert SYSTEM FILE`: the file is read, a recipe is filled in from the system's table, and printed."""

from importlib import import_module
from pathlib import Path

from lmgym.compat.settings.read import read
from lmgym.compat.settings.recipe import Draft
from lmgym.config.yaml import merge, read_yaml

SYSTEMS = {
    "trl": "trl",
    "open-r1": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "nemo-rl": "nemo_rl",
}  # their modules
TABLES = Path(__file__).parent / "tables"


def converted(system: str, path: Path, devices: int | None = None) -> tuple[str, list[str]]:
    """The recipe of a file as YAML, and what has to be filled in before it trains. Raises LmgymError for a file that
    cannot be read.

    Example: converted("verl", Path("run_qwen2-7b.sh"))[1] -> []"""
    table = read_yaml(TABLES / f"{SYSTEMS[system]}.yaml")
    if system == "open-r1":
        table = merge(table, read_yaml(TABLES / "open_r1.yaml"))
    draft = Draft(system, read(path), path, table, devices)
    import_module(f"lmgym.compat.settings.{SYSTEMS[system]}").fill(draft)
    draft.finish()
    return draft.text(), draft.obstacles
