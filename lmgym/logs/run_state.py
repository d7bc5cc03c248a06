"""Whether a run folder is one of a run that trains now, is finished, or has stopped on its way."""

import fcntl
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_json
from lmgym.logs.records import at_once


def run_state(folder: Path, stage: str | None, steps: int) -> str:
    """ "running" while another process trains in the folder; "finished" if its summary.json is about the last stage
    that was recorded (None: it has no name) after so many `steps`, 0 if nothing was trained; else "unfinished".

    Example: run_state(Path("runs/quickstart"), "rl", 400) -> "finished" """
    if is_locked(folder / ".lock"):
        return "running"
    try:
        summary = _summary(folder)
        after = summary["after"]
        same = steps == 0 or (stage in (None, after["stage"]) and after["step"] == steps)
        # A last stage that its first evaluation stopped has recorded no step.
        same = same or (after["step"] == 0 and summary.get("stop") is not None)
    except (LmgymError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unfinished"
    return "finished" if same else "unfinished"


def early_stop(folder: Path) -> str | None:
    """Why the last stage of a finished run stopped before its last step; None if it did not.

    Example: early_stop(Path("runs/quickstart")) -> "reward reached 0.9" """
    try:
        summary = _summary(folder)
        rule = summary["stop"]
        metric, best = str(rule["metric"])[:80], float(summary["early_best"])
        if rule["target"] is not None:
            target = float(rule["target"])
            if best >= (target if rule["mode"] == "max" else -target):  # `best` is larger if it is better
                return f"{metric} reached {target:g}"
        return f"{metric} did not improve {int(rule['patience'])} times"
    except (LmgymError, OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _summary(folder: Path) -> Any:
    return read_json(folder / "summary.json")


def is_locked(path: Path) -> bool:
    """True if another process trains in the folder of this lock."""
    try:
        with open(path, opener=at_once) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a folder of an older version has no lock
        return False
    return False
