"""What lies at each address of the page's data. The server answers with it, and a single file holds it.

runs                                          the runs
list                                          how far each run is, in a line
changes                                       the state of their files, which changes while they train
runs/0/overview                               its recipe, its stages, the first and the newest evaluation
runs/0/newest                                 the newest answers
runs/0/findings                               what the doctor says of it
runs/0/curves                                 all numbers of a run
runs/0/steps/1/40                             a step (stage 1, step 40): its answers as columns of numbers
runs/0/groups/1/40/2                          group 2 of it: its answers side by side
runs/0/answers/train/1/40/17                  answer 17 of it, with its tokens
runs/0/answers/evaluation/1/40/17/SPLIT       likewise, of an evaluation
runs/0/evaluations, runs/0/evaluations/SPLIT  the held-out prompts of the newest evaluation
runs/0/prompts/SPLIT/EXAMPLE                  one of them through training
runs/0/notes                                  the notes on its answers
pairs/0/1                                     two runs: what changed"""

from collections.abc import Sequence
from typing import Any

from lmgym.core.errors import LmgymError, describe
from lmgym.viewer.evaluations import pair_tree, prompt_tree, prompts_tree
from lmgym.viewer.notes import read_notes
from lmgym.viewer.overview import findings_tree, newest_answers, overview_tree
from lmgym.viewer.progress import progress_tree
from lmgym.viewer.rollouts import Moment
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.views import answer_tree, curves_tree, group_tree, runs_tree, step_tree

LONGEST_NUMBER = 12  # digits


class UnknownAddress(LmgymError):
    """There is nothing at an address."""


def tree_at(runs: Sequence[RunRecords], address: str) -> Any:
    """What lies at an address, as JSON can hold it. Raises UnknownAddress, and LmgymError for records that cannot be
    read, make no sense or were not kept.

    Example: tree_at(runs, "runs/0/steps/1/40")["columns"]["score"] -> [0.0, 1.0, ...]"""
    try:
        return _tree_at(runs, address)
    except LmgymError:
        raise
    except Exception as error:  # records of someone else's making; all other addresses must go on
        raise LmgymError(f"these records cannot be made sense of: {describe(error)}") from error


def _tree_at(runs: Sequence[RunRecords], address: str) -> Any:
    match address.split("/"):
        case ["runs"]:
            return runs_tree(runs)
        case ["list"]:
            return [_line_of(run) for run in runs]
        case ["changes"]:
            return [run.state() for run in runs]
        case ["pairs", first, second]:
            return pair_tree(run_of(runs, first), run_of(runs, second))
        case ["runs", number, "findings"]:  # reads all records anew, so nobody waits for it
            return findings_tree(run_of(runs, number))
        case ["runs", number, *rest]:
            run = run_of(runs, number)
            with run.lock:  # what is read of it must not grow meanwhile
                return _of_run(run, rest, address)
    raise UnknownAddress(f"there is nothing at '{address[:200]}'")


def _line_of(run: RunRecords) -> dict[str, Any]:
    """How far a run is, or why that cannot be said: the other runs must be listed."""
    try:
        with run.lock:
            return progress_tree(run)
    except Exception as error:  # records of someone else's making
        return {"problem": describe(error)}


def _of_run(run: RunRecords, rest: Sequence[str], address: str) -> Any:
    match rest:
        case ["overview"]:
            return overview_tree(run)
        case ["newest"]:
            return newest_answers(run)
        case ["curves"]:
            return curves_tree(run)
        case ["notes"]:
            return read_notes(run.folder)
        case ["steps", stage, step]:
            return step_tree(run, whole_number(stage), whole_number(step))
        case ["groups", stage, step, group]:
            return group_tree(run, whole_number(stage), whole_number(step), whole_number(group))
        case ["answers", "train" | "evaluation" as kind, stage, step, index, *split]:
            moment = Moment(kind, whole_number(stage), whole_number(step))
            return answer_tree(run, moment, whole_number(index), "/".join(split) or None)
        case ["evaluations", *split]:
            return prompts_tree(run, "/".join(split) or None)
        case ["prompts", split, *example]:  # the id of an example may hold slashes
            return prompt_tree(run, split, "/".join(example))
    raise UnknownAddress(f"there is nothing at '{address[:200]}'")


def run_of(runs: Sequence[RunRecords], number: str) -> RunRecords:
    """The run of a number. Raises UnknownAddress if there is none."""
    if (place := whole_number(number)) >= len(runs):
        raise UnknownAddress(f"there is no run {place}; there are {len(runs)}, counted from 0")
    return runs[place]


def whole_number(text: str) -> int:
    """A number of an address. Raises UnknownAddress for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER):
        raise UnknownAddress(f"'{text[:50]}' is no whole number")
    return int(text)
