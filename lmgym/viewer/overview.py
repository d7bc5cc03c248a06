"""What a run is: its recipe, how far it is, its first and its newest evaluation, and the doctor's findings."""

from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.logs.doctor.examine import examine
from lmgym.logs.records import METRICS, ROLLOUTS
from lmgym.viewer.curves import ENDS, Table
from lmgym.viewer.episodes import episode_of_record, turn_texts
from lmgym.viewer.progress import progress_tree, steps_of
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.tail import inside

LONGEST_RECIPE = 2**20  # bytes
NEWEST, LONGEST_TEXT = 4, 400  # answers that are shown, and characters of each


def overview_tree(run: RunRecords) -> dict[str, Any]:
    """The recipe as it is written, the steps of each stage, each split's first and newest evaluation, and how far the
    run is."""
    curves = run.curves
    planned = run.recipe.get("stages")
    stages = [
        {"name": name, "steps": curves.clock.lengths.get(stage, 0), "planned": steps_of(planned, stage)}
        for stage, name in sorted(curves.stages.items())
    ]
    splits = {
        name.partition("/")[2]: _first_and_newest(table)
        for name, table in curves.tables.items()
        if name != "train" and table.places
    }
    return {"recipe": _recipe_text(run), "stages": stages, "evaluations": splits, "progress": progress_tree(run)}


def newest_answers(run: RunRecords) -> list[dict[str, Any]]:
    """The beginnings of the answers to the first prompt of the newest step, and of that prompt the end."""
    moments = run.rollouts.moments("train")
    answers = []
    for record in run.rollouts.records(moments[-1])[:NEWEST] if moments else ():
        episode = episode_of_record(record)
        own = {"stage": moments[-1].stage, "step": moments[-1].step, "group": episode.group, "index": episode.index}
        said = " ⏎ ".join(turn_texts(episode))[:LONGEST_TEXT]
        answers.append(own | {"score": episode.score, "text": said, "prompt": episode.example["prompt"]})
    return answers


def _first_and_newest(table: Table) -> dict[str, Any]:
    """The metrics of the first and of the newest evaluation of a split, with their intervals if they have one."""
    rows = {"first": 0, "newest": len(table.places) - 1}
    metrics = []
    for name in table.columns:
        if name == "count" or (name.endswith(ENDS) and name.rpartition("/")[0] in table.columns):
            continue
        values = {
            moment: [_number(table, key, row) for key in (name, *(name + end for end in ENDS))]
            for moment, row in rows.items()
        }
        metrics.append({"name": name, **values})
    return {"metrics": metrics, "places": {moment: list(table.places[row][1:]) for moment, row in rows.items()}}


def _number(table: Table, name: str, row: int) -> float | None:
    if name not in table.columns:
        return None
    value = float(table.column(name)[row])
    return None if value != value else value


def _recipe_text(run: RunRecords) -> str:
    try:
        return read_text(inside(run.folder, "recipe.yaml"), LONGEST_RECIPE)
    except (LmgymError, OSError, ValueError) as error:
        return f"# it cannot be read: {error}"


def findings_tree(run: RunRecords) -> dict[str, Any]:
    """What `lmgym doctor` says of the run. Raises LmgymError if its records cannot be read."""
    for name in (METRICS, ROLLOUTS, "machine.json", ".lock"):
        inside(run.folder, name)
    tree = examine(run.folder, run.recipe).as_json()
    return {name: tree[name] for name in ("state", "steps", "seconds", "findings")}
