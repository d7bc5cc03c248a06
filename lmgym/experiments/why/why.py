"""`lmgym why RUN`: when an answer became more or less likely, and which groups of a step did it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted
from lmgym.experiments.what_if.difference import check_same_answers, unlike_record
from lmgym.experiments.what_if.question import Question
from lmgym.experiments.what_if.retake import Steps, Written, written
from lmgym.experiments.what_if.standing import (
    Start,
    blamed_on_resumes,
    find_start,
    opened,
    reason_unlike,
    standing,
    step_records,
)
from lmgym.experiments.why.asked import asked_batch, asked_example
from lmgym.experiments.why.influence import Influences, check_split, influences
from lmgym.logs.console import Console
from lmgym.models.policy import Policy
from lmgym.training.checkpoints import checkpoint
from lmgym.training.loop import advance, log_step
from lmgym.training.machine import choose_machine
from lmgym.training.setup import load_data, load_weights
from lmgym.training.stage import StageRun
from lmgym.training.tracing import begin_trace
from lmgym.types import Episode, Example
from lmgym.updates.update import update


@dataclass(frozen=True)
class Point:
    """The log-probability of the answer, in nats, after so many `steps` of the stage. Example: Point(20, -3.1)"""

    steps: int
    logprob: float


@dataclass(frozen=True)
class Group:
    """A group of the step: its number there, its prompt's example, its answers with their scores, and by how much
    (nats) it moved the answer that was asked about. Example: Group(3, "arithmetic/train/7", ["8", "9"], [1.0, 0.0],
    0.013)"""

    number: int
    example: str
    answers: list[str]
    scores: list[float | None]
    influence: float


@dataclass(frozen=True)
class Why:
    """What moved an answer: its `points` over the checkpoints, and of one `step` of a `stage` (both counted from 0)
    the groups, those that raised it most first. `real` is the change that the step really made, `parts.total` the one
    of first order, as if its `optimizer_steps` were one. `unlike` names what did not come out as the run has recorded
    it (empty: bit for bit the same), and `reason` says why, where that is known."""

    example: Example
    tokens: int
    token: str | None
    """The one token that was asked about; None: all of the answer's."""
    points: list[Point]
    stage: int
    step: int
    groups: list[Group]
    parts: Influences
    real: float
    optimizer_steps: int
    unlike: list[str]
    reason: str


def why(
    question: Question,
    example: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    step: int | None = None,
    token: int | None = None,
    console: Console | None = None,
) -> Why:
    """What moved an answer to an example (by its id) or to a prompt, or one `token` of it, counted from 1. `step`
    counts from 0; None: the one behind the checkpoint from which the answer changed most until the next. The run folder
    is only read.

    Raises LmgymError where there is no such example or token, the step cannot be reached, or is no sum over groups, or
    where its answers, their scores or its learning rate are not those that the run has recorded.

    Example: why(ask(Path("runs/a"), []), example="arithmetic/validation/3").groups[0].influence"""
    console = console or Console(quiet=True)
    folder, config, stage = question.folder, question.real, question.stage
    records = step_records(folder, stage)
    check_split(config.stages[stage].algorithm)
    asked = asked_example(load_data(config), stage, example, prompt, answer)
    # 1. The answer over the checkpoints.
    points, tokens, piece = [], 0, None
    for steps, policy in _policies(question, max(records, default=-1) + 1):
        batch = asked_batch(config, policy, asked, token)
        tokens = int(batch.actions.sum())
        piece = None if token is None else policy.tokenizer.decode(batch.tokens[batch.actions].tolist())
        points.append(Point(steps, answer_logprob(policy, batch)))
    # 2. The step.
    begin = find_start(question, _turning_point(points, records) if step is None else step, records)
    if sentence := begin.sentence(records):
        console.say(sentence)
    with blamed_on_resumes(question, begin):
        groups, parts, real, own = _split(question, begin, asked, token)
    # 3. The proof that this is what the run did.
    unlike, _ = unlike_record(folder, stage, records[begin.step], own)
    reason = reason_unlike(question, begin, own.changed)
    check_same_answers(folder, begin.step, unlike, reason)
    if "learning_rate" in unlike:
        had, has = records[begin.step]["learning_rate"], own.record["learning_rate"]
        raise LmgymError(
            f"{folder}: step {begin.step + 1} had the learning rate {had:g}, and now it has {has:g}{reason}, so its "
            "groups would move the answer by other amounts than they did; ask about a later step"
        )
    optimizer_steps = config.stages[stage].algorithm.optimizer_steps
    return Why(asked, tokens, piece, points, stage, begin.step, groups, parts, real, optimizer_steps, unlike, reason)


def _policies(question: Question, taken: int) -> Iterator[tuple[int, Policy]]:
    """The policy at each whole checkpoint of the stage, one at a time, with the steps before it; first the model as the
    run began, if the stage is the run's first."""
    config, machine = question.real, choose_machine(question.real, question.folder)
    places: list[tuple[int, Path | None]] = [(0, None)] if question.stage == 0 and taken else []
    for path in checkpoint.all_checkpoints(question.folder / "checkpoints"):
        stage, steps = checkpoint.stage_and_step(path)
        if stage == question.stage and (steps or not places) and checkpoint.damage(path) is None:
            places.append((steps, path))
    if not places:
        raise LmgymError(f"{question.folder} has no whole checkpoint of stage '{question.name}', and took no step")
    for steps, weights in counted(places, "scoring the answer", "checkpoints"):
        policy = load_weights(config.policy, config.seed, machine, weights)
        if weights is not None:
            policy.had_updates(checkpoint.read_state(weights)["version"])
        yield steps, policy


def _turning_point(points: Sequence[Point], records: dict[int, dict[str, object]]) -> int | None:
    """The step behind the point from which the answer changed most until the next one; None with fewer than two."""
    changes = [(abs(later.logprob - one.logprob), one.steps) for one, later in pairwise(points) if one.steps in records]
    return max(changes)[1] if changes else None


@contextmanager
def before_update(question: Question, begin: Start) -> Iterator[tuple[StageRun, list[Episode], Batch]]:
    """The run right before the update of a step: its stage, the step's answers, and the prepared batch of them.

    Example: with before_update(question, begin) as (stage, episodes, batch): ..."""
    with standing(question, begin) as place, opened(place, question.real, question.real) as stage:
        steps = Steps(stage, question.folder, range(begin.at, begin.step + 1), judge=False)
        for number in range(begin.at, begin.step):
            steps.take(number)
        yield (stage, *steps.prepared(begin.step))


def _split(
    question: Question, begin: Start, asked: Example, token: int | None
) -> tuple[list[Group], Influences, float, Written]:
    """Bring the run to the step, split it, and take it as the training loop does."""
    with before_update(question, begin) as (stage, episodes, batch):
        policy = stage.run.policy
        row = asked_batch(question.real, policy, asked, token)
        before = answer_logprob(policy, row)
        parts = influences(stage.algorithm, policy, batch, stage.optimizer, row)
        trace = begin_trace(stage, episodes, batch, begin.step)
        metrics = update(stage.algorithm, policy, batch, stage.optimizer, trace)
        advance(stage)
        log_step(stage, episodes, batch, metrics, trace)
        change = answer_logprob(policy, row) - before
        return _groups(episodes, parts), parts, change, written(stage, begin.step)


def _groups(episodes: Sequence[Episode], parts: Influences) -> list[Group]:
    """The groups with their answers, those that raised the answer most first."""
    found = []
    for number, influence in parts.groups.items():
        own = [episode for episode in episodes if episode.group == number and episode.selected]
        scores = [episode.score if episode.judged else None for episode in own]
        found.append(Group(number, own[0].example.id, [episode.text for episode in own], scores, influence))
    return sorted(found, key=lambda group: group.influence, reverse=True)


def answer_logprob(policy: Policy, batch: Batch) -> float:
    """The log-probability of all answers of a batch, in nats."""
    logprobs = policy.compute_logprobs_no_grad(batch).logprobs
    return float(logprobs[batch.actions.to(logprobs.device)].double().sum())
