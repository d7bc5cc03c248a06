"""`lmgym what-if RUN key=value --try N`: N steps really taken under the changed recipe, beside those that the run took:
from one state, with the same prompts and the same random numbers, so that the two are paired."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.experiments.compared_tables import print_differences
from lmgym.experiments.paired_metrics import completed, numbers_of, pair_metrics, zeros
from lmgym.experiments.what_if.difference import unlike_numbers
from lmgym.experiments.what_if.question import Question
from lmgym.experiments.what_if.retake import Steps
from lmgym.experiments.what_if.standing import (
    Start,
    blamed_on_resumes,
    changed_since,
    check_learned,
    find_start,
    opened,
    reason_unlike,
    standing,
    step_records,
)
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal
from lmgym.logs.traces.trace import read_step
from lmgym.rollouts.evaluate import better_directions, is_share
from lmgym.rollouts.rollout import groups_of
from lmgym.stats.paired import Paired, compare_paired
from lmgym.training.setup import evaluate_actor, held_out_rewards
from lmgym.training.stage import StageRun
from lmgym.training.stage_checkpoint import save_checkpoint

ROWS = 10  # steps of a curve that are printed
Values = dict[tuple[int, str], list[float]]  # of each step and prompt, a number for each answer


@dataclass(frozen=True)
class Side:
    """The `values` of each metric, and those of the held-out prompts behind the last step. Example: Side({}, {})"""

    values: dict[str, Values]
    held_out: Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Trial:
    """The steps of both sides. `curves`: the mean of each metric in each step, as it was and as it would be; `paired`:
    its difference over the prompts of all steps but the first, whose answers are of the same policy; `held_out`: of the
    prompts of the recipe's evaluation, after the last step. `unlike`: of each step that did not come out as the run has
    recorded it, though it was taken as it was, the numbers that are others; `reason` says why, where that is known.
    `notes` are sentences about held-out metrics that are not compared.

    Example: try_steps(question, step=None, count=20).held_out["reward"].difference"""

    question: Question
    begin: Start
    count: int
    curves: dict[str, tuple[dict[int, float], dict[int, float]]]
    paired: dict[str, Paired]
    held_out: dict[str, Paired]
    better: dict[str, int]
    unlike: dict[int, list[str]]
    reason: str
    notes: list[str]


def try_steps(question: Question, step: int | None, count: int, console: Console) -> Trial:
    """Take `count` steps from `step` on (from 0; None: where a checkpoint stands), as the run did and as the question
    has it. Raises LmgymError as `what_if` does, and if the stage has not so many steps. Steps that do not come out as
    the run has recorded them are named, not refused."""
    records = step_records(question.folder, question.stage)
    begin = find_start(question, step, records)
    check_learned(question, begin.step)
    steps = question.real.stages[question.stage].steps
    if not question.changes:
        raise LmgymError(
            "--try takes steps with something changed; add key=value, such as optimizer.learning_rate=1e-5"
        )
    if not question.real.stages[question.stage].source.samples:
        raise LmgymError("--try compares the rewards of sampled answers, and this stage samples none")
    if not 1 <= count <= steps - begin.step:
        raise LmgymError(f"--try is {count}; from step {begin.step + 1} on, stage '{question.name}' has 1 to "
                         f"{steps - begin.step} steps")  # fmt: skip
    with standing(question, begin) as place:
        with blamed_on_resumes(question, begin), opened(place, question.real, question.real) as stage:
            if begin.step > begin.at:
                _go_to(stage, question.folder, begin)
            one = _taken(stage, question, begin.step, count, console)
        taken = step_records(place, question.stage)
        reason = reason_unlike(question, begin, changed_since(place))
        with opened(place, question.real, question.changed) as stage:
            other = _taken(stage, question, begin.step, count, console)
    parted = {step: unlike_numbers(records[step], own) for step, own in taken.items() if step in records}
    # What is rewarded in both is compared.
    rewards = [config.stages[question.stage].rewards for config in (question.real, question.changed)]
    names = [name for name in one.values if name in other.values and (name != "reward" or rewards[0] == rewards[1])]
    paired = {name: _pair(one.values[name], other.values[name], begin.step, is_share(name)) for name in names}
    held_out = completed([one.held_out, other.held_out], zeros)
    for own in held_out if rewards[0] != rewards[1] else ():
        own.pop("reward", None)
    held, notes = pair_metrics(held_out[0], held_out[1])
    return Trial(
        question,
        begin,
        count,
        curves={name: (_curve(one.values[name]), _curve(other.values[name])) for name in names},
        paired={name: found for name, found in paired.items() if found is not None},
        held_out=held,
        better=better_directions(held, held_out_rewards(question.real, question.real.stages[question.stage])),
        unlike={step: numbers for step, numbers in parted.items() if numbers},
        reason=reason,
        notes=notes,
    )


def print_trial(trial: Trial, console: Console) -> None:
    """Print the curves side by side, and the paired differences."""
    question, first = trial.question, trial.begin.step + 1
    last = first + trial.count - 1
    console.say(f"{question.folder}, stage {question.name}: steps {first} to {last} taken twice, with the same seeds")
    for sentence in _introduction(trial):
        console.say(sentence)
    shown = sorted({trial.begin.step + round(at * (trial.count - 1) / (ROWS - 1)) for at in range(ROWS)})
    for name, (real, changed) in trial.curves.items():
        rows = [(str(step + 1), decimal(real.get(step)), decimal(changed.get(step))) for step in shown]
        console.table(f"{name}, mean of a step", ("step", "A: as it was", "B: what if"), rows)
    if trial.paired:
        behind = f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"
        title = f"B - A, prompts of {behind} [95% interval]: of these two runs, not of other seeds"
        print_differences(title, trial.paired, trial.better, console)
    if trial.held_out:
        print_differences(
            f"B - A, held-out prompts after step {last} [95% interval]", trial.held_out, trial.better, console
        )
    for note in trial.notes:
        console.say(note)


def _introduction(trial: Trial) -> Iterator[str]:
    """What is asked, and whether the steps as they were came out as the run has recorded them."""
    for change in trial.question.changes:
        yield f"B: what if {change}"
    if trial.unlike:
        first = min(trial.unlike)
        yield (
            f"A (as it was) is not what the run took: from step {first + 1} on it gives other numbers than the run has "
            f"recorded{trial.reason}: {', '.join(trial.unlike[first][:5])}"
        )
    elif trial.reason:
        yield f"A and B are taken with what has changed{trial.reason}"


def trial_json(trial: Trial) -> dict[str, Any]:
    """Everything, for programs; stages and steps count from 0, as in metrics.jsonl. A curve is a list of
    [step, as it was, what if]."""
    question = trial.question
    return {
        "stage": question.stage,
        "step": trial.begin.step,
        "count": trial.count,
        "changes": question.changes,
        "said": [*_introduction(trial)],
        "unlike": [[step, names] for step, names in trial.unlike.items()],
        "curves": {
            name: [(step, one[step], other.get(step)) for step in one] for name, (one, other) in trial.curves.items()
        },
        "paired": {name: asdict(one) for name, one in trial.paired.items()},
        "held_out": {name: asdict(one) for name, one in trial.held_out.items()},
        "notes": trial.notes,
    }


def _go_to(stage: StageRun, folder: Path, begin: Start) -> None:
    steps = Steps(stage, folder, range(begin.at, begin.step), judge=False)
    for step in range(begin.at, begin.step):
        steps.take(step)
    save_checkpoint(stage)


def _taken(stage: StageRun, question: Question, first: int, count: int, console: Console) -> Side:
    """The numbers of the answers of these steps, and of the held-out answers behind them."""
    steps, values = Steps(stage, question.folder, [], judge=False), dict[str, Values]()
    steps.recorded = False
    for step in range(first, first + count):
        console.doing(f"step {step + 1}")
        steps.take(step)
        table = read_step(stage.run.folder, stage.index, step).episodes
        parts = {f"reward/{name}": column for name, column in table["reward_components"].items()}
        for name, column in ({"reward": table["score"]} | parts | {"length/mean": table["length"]}).items():
            for group, example, value in zip(table["group"], table["example"], column, strict=True):
                if value is not None:
                    place = (step, f"{group} {example}")
                    values.setdefault(name, {}).setdefault(place, []).append(float(value))
    run, section = stage.run, question.real.evaluation
    if not section.examples:
        return Side(values, {})
    run.renew_engine()
    rewards = held_out_rewards(question.real, question.real.stages[question.stage])
    result = evaluate_actor(run.config, stage.actor, run.data.held_out[section.split], rewards)
    return Side(values, numbers_of(groups_of(result.episodes), rewards, section.best_of))


def _curve(values: Values) -> dict[int, float]:
    """The mean over all answers of each step."""
    every: dict[int, list[float]] = {}
    for (step, _), own in values.items():
        every.setdefault(step, []).extend(own)
    return {step: mean(own) for step, own in every.items()}


def _pair(one: Values, other: Values, first: int, shares: bool) -> Paired | None:
    """The prompts that both sides had behind the first step, compared; None if there are none."""
    common = [place for place in one if place in other and place[0] > first]
    return compare_paired([one[at] for at in common], [other[at] for at in common], shares=shares) if common else None
