"""Which folders are runs, and which hold several."""

from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.files import nearby
from lmgym.logs.records import METRICS


def is_run(folder: Path) -> bool:
    """Whether a folder has the records of a run."""
    return (folder / METRICS).is_file()


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs right below it, by name."""
    return [folder] if is_run(folder) else sorted(path.parent for path in folder.glob(f"*/{METRICS}"))


def check_there(folder: Path) -> None:
    """Raise LmgymError for a folder that is not there."""
    if not folder.is_dir():
        raise LmgymError(f"there is no run folder {folder}{nearby(folder)}")


def run_folder(name: str) -> Path:
    """The folder of this name. Raises LmgymError unless it is that of a single run."""
    folder = Path(name)
    check_there(folder)
    if is_run(folder):
        return folder
    if runs := runs_in(folder):
        raise LmgymError(f"{folder} holds {len(runs)} runs; name one of them, such as {runs[0]}")
    raise LmgymError(f"{folder} has no {METRICS}, so it is no run; name the folder of a run, such as runs/quickstart")
