"""A run as it stood before one of its steps: in a folder of its own, since nothing is written into the run's.

Runs repeat bit for bit, so a run can be brought to any step: from the nearest checkpoint before it, or from the
beginning of its first stage, by taking the steps in between again."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.experiments.what_if.question import Question
from lmgym.logs.console import Console
from lmgym.logs.doctor.facts import bounded
from lmgym.logs.records import METRICS, read_records
from lmgym.training.begin_stage import begin_stage
from lmgym.training.checkpoints import checkpoint
from lmgym.training.machine import choose_machine
from lmgym.training.resuming.resume import listed
from lmgym.training.setup import load_weights, start
from lmgym.training.stage import StageRun

Records = dict[int, dict[str, Any]]  # the training record of each step of a stage


@dataclass(frozen=True)
class Start:
    """Where a step can be reached from: a `checkpoint` (None: the beginning of the run) with so many steps `at` it; and
    the `step` that is asked about, counted from 0. Example: Start(Path("runs/a/checkpoints/..."), at=50, step=52)"""

    checkpoint: Path | None
    at: int
    step: int

    def sentence(self, records: Records) -> str:
        """What has to be done before the step can be taken, and how long the run itself has taken for it."""
        left = self.step - self.at
        if not left:
            return ""
        place = f"checkpoint {self.checkpoint.name}" if self.checkpoint else "the beginning of the run"
        seconds = sum(bounded(records.get(step, {}).get("seconds")) or 0.0 for step in range(self.at, self.step))
        several = "1 step" if left == 1 else f"{left} steps"
        return f"{place} is {several} before step {self.step + 1}: taking them again (the run took {seconds:.3g} s)"


def step_records(folder: Path, stage: int) -> Records:
    """The training record of each step of a stage. Raises LmgymError if metrics.jsonl is missing or damaged."""
    records = read_records(folder / METRICS)
    return {one["step"]: one for one in records if one["kind"] == "train" and one["stage"] == stage}


def find_start(question: Question, step: int | None, records: Records) -> Start:
    """Where the run can be brought to a step from, which counts from 0. None: the last step that a checkpoint stands
    right before. Raises LmgymError for a step that the run has not taken, and if no checkpoint before it is left."""
    folder, stage = question.folder, question.stage
    last = max(records, default=-1)
    if step is not None and step not in records:
        raise LmgymError(
            f"{folder} has no step {step + 1} of stage '{question.name}'; it took {last + 1}, so --step is 1 to "
            f"{last + 1}"
        )
    most = last if step is None else step
    saved = [path for path in checkpoint.all_checkpoints(folder / "checkpoints") if not path.name.startswith(".")]
    places = [(path, *checkpoint.stage_and_step(path)) for path in saved]
    before = [(path, at) for path, its_stage, at in places if its_stage == stage and at <= most]
    problem = ""
    for path, at in reversed(before):
        damage = checkpoint.damage(path)
        if damage is None:
            return Start(path, at, at if step is None else step)
        problem = f" ({path.name} is damaged: {damage})"
    if stage == 0 and last >= 0:
        return Start(None, 0, 0 if step is None else step)
    raise LmgymError(
        f"{folder} has no whole checkpoint of stage '{question.name}' before step {most + 1}{problem}; checkpoint.keep "
        "says how many a run keeps"
    )


def resumed_behind(question: Question, begin: Start) -> str:
    """In words, what was changed when the run was resumed behind the place that a step is reached from; empty if
    nothing was. A step before that is taken again with what recipe.yaml says since then."""
    return "; ".join(
        f"the run was resumed at step {one['step'] + 1}"
        + (f" of stage '{question.real.stages[one['stage']].name}'" if one["stage"] != question.stage else "")
        + f", and {listed(one['changed'])}"
        for one in _resumed(question)
        if (one["stage"], one["step"]) > (question.stage, begin.at)
    )


def reason_unlike(question: Question, begin: Start, changed: Sequence[str]) -> str:
    """In brackets, why a step does not come out as it was recorded: what a later resume has changed, or else what is
    not as it was when the checkpoint was written (`changed`), unless the step itself was already taken so."""
    if later := resumed_behind(question, begin):
        return f" ({later})"
    here = [one["changed"] for one in _resumed(question) if (one["stage"], one["step"]) == (question.stage, begin.at)]
    rest = [text for text in changed if not any(text in texts for texts in here)]
    return f" (since the run {listed(rest)})" if rest else ""


@contextmanager
def blamed_on_resumes(question: Question, begin: Start) -> Iterator[None]:
    """Where a step cannot be taken again, and a later resume has changed something, the sentence begins with that."""
    try:
        yield
    except LmgymError as error:
        if not (later := resumed_behind(question, begin)):
            raise
        raise LmgymError(
            f"{question.folder}: step {begin.step + 1} cannot be taken again, since it is taken with what was changed "
            f"behind it ({later}); ask about a later step. What came of it: {error}"
        ) from error


def changed_since(place: Path) -> list[str]:
    """What was not as it was at the checkpoint when the temporary run was taken up there."""
    return [text for one in read_records(place / METRICS) if one["kind"] == "resume" for text in one["changed"]]


def _resumed(question: Question) -> list[dict[str, Any]]:
    """The records of the run's resumes that changed something."""
    return [one for one in read_records(question.folder / METRICS) if one["kind"] == "resume" and one["changed"]]


@contextmanager
def standing(question: Question, begin: Start) -> Iterator[Path]:
    """A temporary folder in which the run stands at a checkpoint, or has not begun. Files are linked where the disk
    allows it, else copied. Raises LmgymError if it cannot be made."""
    with tempfile.TemporaryDirectory(prefix="lmgym-what-if-") as temporary:
        place = Path(temporary) / "run"
        try:
            place.mkdir()
            if (question.folder / "machine.json").is_file():
                shutil.copyfile(question.folder / "machine.json", place / "machine.json")
            if begin.checkpoint is not None:
                found = [begin.checkpoint]
                for name, step in checkpoint.read_state(begin.checkpoint)["copies"].items():
                    if Path(name).name != name:
                        raise LmgymError(
                            f"{begin.checkpoint / 'state.json'} names a copy {name!r:.60}, which is no name"
                        )
                    found.append(checkpoint.copy_path(question.folder, question.stage, name, step))
                for path in found:
                    shutil.copytree(path, place / path.parent.name / path.name, copy_function=_linked)
        except (OSError, shutil.Error) as error:
            raise LmgymError(f"{question.folder} cannot be copied to {temporary} ({error})"[:400]) from error
        yield place


@contextmanager
def opened(place: Path, real: Config, asked: Config) -> Iterator[StageRun]:
    """The stage that a run stands in, at its newest checkpoint in `place`, as the `asked` recipe has it; `real` is that
    of the run. Its answers are all traced; it draws no pictures and calls no tracker and no callback."""
    logs = replace(real.logs, sinks=[], traces="all", traces_gib=1024.0, predictions=False)
    with start(replace(real, out=str(place), callbacks={}, logs=logs), Console(quiet=True)) as run:
        run.config = replace(asked, out=str(place), callbacks={}, logs=logs)
        with begin_stage(run) as stage:
            if run.progress.step and "reference" in stage.frozen_models.taken:
                _give_reference(stage, real)
            yield stage


def check_learned(question: Question, step: int) -> None:
    """Raise LmgymError if the changed recipe needs what a run of it would have learned before this step: a value
    function, moments, or the algorithm's own state."""
    if step == 0:
        return
    one, other = (config.stages[question.stage] for config in (question.real, question.changed))
    before, now = one.algorithm, other.algorithm
    remedy = "ask about the stage's first step (--step 1), before which nothing has been learned, or train anew"
    if before.requirements.values != now.requirements.values or before.optimized != now.optimized:
        raise LmgymError(
            "algorithm: the one trains a value function (or leaves parameters to its driver) and the other does not, "
            f"so no checkpoint holds what the changed one would have learned until then; {remedy}"
        )
    if one.optimizer.name != other.optimizer.name:
        raise LmgymError(f"optimizer.name: another optimizer would have other moments at this step; {remedy}")
    if type(before) is not type(now) and {*before.state_dict()} != {*now.state_dict()}:
        raise LmgymError(
            "algorithm: it keeps a state from step to step (such as a moving baseline), which is not that of the run's "
            f"algorithm; {remedy}"
        )
    if now.requirements.reference and not before.requirements.reference and question.stage > 0:
        raise LmgymError(f"algorithm: the run kept no reference of this stage's beginning; {remedy}")


def _give_reference(stage: StageRun, real: Config) -> None:
    """Where the run had no reference, the model as it began: what a run with one would have taken."""
    if not real.stages[stage.index].algorithm.requirements.reference:
        machine = choose_machine(real, stage.run.folder)
        stage.frozen_models.take("reference", load_weights(real.policy, real.seed, machine, None), 0)


def _linked(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
