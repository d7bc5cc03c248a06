"""`lmgym what-if RUN key=value ...`: what a changed recipe would have made of the answers of one step."""

import gc
from dataclasses import dataclass
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.experiments.what_if.difference import StepDifference, check_same_answers, compare_steps, unlike_record
from lmgym.experiments.what_if.question import Question
from lmgym.experiments.what_if.retake import Retaken, Steps, retake
from lmgym.experiments.what_if.standing import (
    Start,
    blamed_on_resumes,
    check_learned,
    find_start,
    opened,
    reason_unlike,
    standing,
    step_records,
)
from lmgym.logs.console import Console
from lmgym.training.stage_checkpoint import save_checkpoint


@dataclass(frozen=True)
class WhatIf:
    """A step as the run took it and as it would have been. `unlike` names what did not come out as the run has recorded
    it (empty: bit for bit the same), of so many `compared` numbers and arrays, and `reason` why, where that is known;
    `difference` is None if nothing was changed."""

    question: Question
    begin: Start
    real: Retaken
    changed: Retaken | None
    unlike: list[str]
    reason: str
    compared: int
    difference: StepDifference | None


def what_if(question: Question, step: int | None = None, console: Console | None = None) -> WhatIf:
    """Take one step of a run again, as it was and as the question has it. `step` counts from 0; None: the last one that
    a checkpoint stands right before. The run folder is only read.

    Raises LmgymError if the step cannot be reached, or if other answers or scores come out than the run has recorded.

    Example: what_if(ask(Path("runs/a"), ["algorithm.surrogate.high=0.3"])).difference.gradient.cosine"""
    console = console or Console(quiet=True)
    folder, stage = question.folder, question.stage
    records = step_records(folder, stage)
    begin = find_start(question, step, records)
    check_learned(question, begin.step)
    if sentence := begin.sentence(records):
        console.say(sentence)
    with standing(question, begin) as place:
        with blamed_on_resumes(question, begin):
            real = take_real(question, begin, place, look_ahead=bool(question.changes))
        unlike, compared = unlike_record(folder, stage, records[begin.step], real)
        reason = reason_unlike(question, begin, real.changed)
        check_same_answers(folder, begin.step, unlike, reason)
        gc.collect()  # the first model goes before the second one comes
        changed = take_changed(question, begin, place, real) if question.changes else None
    difference = compare_steps(real, changed) if changed else None
    return WhatIf(question, begin, real, changed, unlike, reason, compared, difference)


def take_real(question: Question, begin: Start, place: Path, look_ahead: bool = False) -> Retaken:
    """Bring the run to the step, leave a checkpoint of it in `place`, and take the step as the run did."""
    with opened(place, question.real, question.real) as stage:
        steps = Steps(stage, question.folder, range(begin.at, begin.step + 1), judge=False)
        for step in range(begin.at, begin.step):
            steps.take(step)
        if begin.step > begin.at:
            save_checkpoint(stage)
        return retake(steps, begin.step, look_ahead=look_ahead)


def take_changed(question: Question, begin: Start, place: Path, real: Retaken) -> Retaken:
    """Take the step as the changed recipe has it, from the same state, with the same answers."""
    one, other = (config.stages[question.stage] for config in (question.real, question.changed))
    with opened(place, question.real, question.changed) as stage:
        steps = Steps(stage, question.folder, [begin.step], judge=one.rewards != other.rewards)
        changed = retake(steps, begin.step, following=real.following)
    for index, answer in real.answers.items():
        same = changed.answers.get(index)
        if same is None or [row.tokens.tolist() for row in same.rows] != [row.tokens.tolist() for row in answer.rows]:
            raise LmgymError(
                f"step {begin.step + 1}: the changed recipe draws other answers than the run did, so the record says "
                "nothing about it; --try N takes steps with answers of its own"
            )
    return changed
