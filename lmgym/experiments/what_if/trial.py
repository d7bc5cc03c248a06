"""`lmgym what-if RUN key=value --try N`: N steps really taken under the changed recipe, beside those that the run took:
from one state, with the same prompts and the same random numbers, so that the two are paired."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.experiments.compared_tables import print_differences
from lmgym.experiments.what_if.question import Question
from lmgym.experiments.what_if.retake import Steps
from lmgym.experiments.what_if.standing import Start, check_learned, find_start, opened, standing, step_records
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal
from lmgym.logs.traces.trace import read_step
from lmgym.rollouts.evaluate import better_directions, is_share, measured
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
    prompts of the recipe's evaluation, after the last step.

    Example: try_steps(question, step=None, count=20).held_out["reward"].difference"""

    question: Question
    begin: Start
    count: int
    curves: dict[str, tuple[dict[int, float], dict[int, float]]]
    paired: dict[str, Paired]
    held_out: dict[str, Paired]
    better: dict[str, int]


def try_steps(question: Question, step: int | None, count: int, console: Console) -> Trial:
    """Take `count` steps from `step` on (from 0; None: where a checkpoint stands), as the run did and as the question
    has it. What is rewarded in both is compared. Raises LmgymError as `what_if` does, and if the stage has not so many
    steps."""
    records = step_records(question.folder, question.stage)
    begin = find_start(question, step, records)
    check_learned(question, begin.step)
    steps = question.real.stages[question.stage].steps
    if not question.changes:
        raise LmgymError(
            "--try takes steps with something changed; add key=value, such as optimizer.learning_rate=1e-5"
        )
    if not 1 <= count <= steps - begin.step:
        raise LmgymError(f"--try is {count}; from step {begin.step + 1} on, stage '{question.name}' has 1 to "
                         f"{steps - begin.step} steps")  # fmt: skip
    sides = list[Side]()
    with standing(question, begin) as place:
        for asked in (question.real, question.changed):
            with opened(place, question.real, asked) as stage:
                if not stage.source.samples:
                    raise LmgymError("--try compares the rewards of sampled answers, and this stage samples none")
                if not sides and begin.step > begin.at:
                    _go_to(stage, question.folder, begin)
                sides.append(_taken(stage, question, begin.step, count, console))
    one, other = sides
    rewards = [config.stages[question.stage].rewards for config in (question.real, question.changed)]
    names = [name for name in one.values if name in other.values and (name != "reward" or rewards[0] == rewards[1])]
    paired = {name: _pair(one.values[name], other.values[name], begin.step, is_share(name)) for name in names}
    held = {
        name: compare_paired(one.held_out[name], other.held_out[name], shares=is_share(name))
        for name in one.held_out
        if name in other.held_out
        and all([*one.held_out[name], *other.held_out[name]])  # judged on both sides
        and (name != "reward" or rewards[0] == rewards[1])
    }
    return Trial(
        question,
        begin,
        count,
        curves={name: (_curve(one.values[name]), _curve(other.values[name])) for name in names},
        paired={name: found for name, found in paired.items() if found is not None},
        held_out=held,
        better=better_directions(held, held_out_rewards(question.real, question.real.stages[question.stage])),
    )


def print_trial(trial: Trial, console: Console) -> None:
    """Print the curves side by side, and the paired differences."""
    question, first = trial.question, trial.begin.step + 1
    last = first + trial.count - 1
    console.say(f"{question.folder}, stage {question.name}: steps {first} to {last} taken twice, with the same seeds")
    for change in question.changes:
        console.say(f"B: what if {change}")
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


def trial_json(trial: Trial) -> dict[str, Any]:
    """Everything, for programs; stages and steps count from 0, as in metrics.jsonl. A curve is a list of
    [step, as it was, what if]."""
    question = trial.question
    return {
        "stage": question.stage,
        "step": trial.begin.step,
        "count": trial.count,
        "changes": question.changes,
        "curves": {
            name: [(step, one[step], other.get(step)) for step in one] for name, (one, other) in trial.curves.items()
        },
        "paired": {name: asdict(one) for name, one in trial.paired.items()},
        "held_out": {name: asdict(one) for name, one in trial.held_out.items()},
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
    return Side(values, measured(groups_of(result.episodes), rewards))


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
