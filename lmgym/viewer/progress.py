"""How far a run is, in a line: its state, its steps, the time left, its newest numbers, and its reward as a curve."""

from typing import Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.logs.run_state import early_stop, run_state
from lmgym.viewer.curves import ENDS, Table
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.tail import inside

POINTS = 40  # of the small curve
RECENT = 20  # steps, of which the mean tells how long one takes


def progress_tree(run: RunRecords) -> dict[str, Any]:
    """State, why it `stopped` early (None: it did not), steps, planned steps and seconds left (None: not known), the
    newest reward, the newest evaluation's first number with its interval, and the reward as at most POINTS numbers.

    Example: progress_tree(run)["state"] -> "running", "finished" or "unfinished"
    """
    curves = run.curves
    train = curves.tables.get("train")
    stages = run.recipe.get("stages")
    planned = [steps_of(stages, number) for number in range(len(stages))] if isinstance(stages, list) else []
    whole = sum(one for one in planned if one is not None) if planned and None not in planned else None
    steps = sum(curves.clock.lengths.values())
    state = state_of(run)
    column = next((name for name in ("reward", "loss") if train is not None and name in train.columns), "")
    values = train.column(column) if train is not None and column else np.array([])
    values = values[~np.isnan(values)]
    stopped = early_stop(run.folder) if state == "finished" and whole is not None and steps < whole else None
    tree = {
        "stopped": stopped,
        "state": state,
        "steps": steps,
        "planned": whole,
        "left": None,
        "metric": column,
        "began": _began(run),
    }
    if state == "running" and whole is not None and train is not None and "seconds" in train.columns:
        seconds = train.column("seconds")[-RECENT:]
        known = seconds[~np.isnan(seconds)]
        tree["left"] = float(known.mean()) * max(0, whole - steps) if len(known) else None
    small = [float(own.mean()) for own in np.array_split(values, min(POINTS, len(values)))] if len(values) else []
    return tree | {"curve": small, "held_out": _newest_evaluation(curves.tables)}


def steps_of(stages: Any, stage: int) -> int | None:
    """How many steps the recipe gives a stage; None if it does not say."""
    try:
        return int(stages[stage]["steps"])
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def state_of(run: RunRecords) -> str:
    """logs/run_state.py's word for it; "unfinished" for a folder whose files are links that lead out of it."""
    train = run.curves.tables.get("train")
    _, stage, step = train.places[-1] if train is not None and train.places else (0, 0, -1)
    try:
        for name in (".lock", "summary.json"):
            inside(run.folder, name)
    except LmgymError:
        return "unfinished"
    return run_state(run.folder, run.curves.stages.get(stage), step + 1)


def _began(run: RunRecords) -> float | None:
    """When the recipe was written, in seconds since 1970: a run begins with it."""
    try:
        return inside(run.folder, "recipe.yaml").stat().st_mtime
    except (LmgymError, OSError):
        return None


def _newest_evaluation(tables: dict[str, Table]) -> dict[str, Any] | None:
    """The first number of the split that was evaluated last, with its interval."""
    known = [(table.places[-1], name) for name, table in tables.items() if name != "train" and table.places]
    for _, name in sorted(known, reverse=True):
        table = tables[name]
        for metric in ("reward", *table.columns):
            values = table.column(metric) if metric in table.columns else np.array([])
            if metric == "count" or metric.endswith(ENDS) or not len(values) or np.isnan(values[-1]):
                continue
            ends = [table.column(metric + end)[-1] if metric + end in table.columns else np.nan for end in ENDS]
            low, high = (None if np.isnan(end) else float(end) for end in ends)
            return {
                "name": metric,
                "split": name.partition("/")[2],
                "value": float(values[-1]),
                "low": low,
                "high": high,
            }
    return None
