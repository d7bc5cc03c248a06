"""Answers that have no part in a step: those whose environment failed, and those that no reward could judge."""

from collections.abc import Sequence
from typing import NoReturn

from lmgym.algorithms.requirements import Requirements
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward
from lmgym.rollouts.play import who_moved
from lmgym.training.stage import StageRun
from lmgym.types import Episode


def usable_groups(groups: list[list[Episode]], required: Requirements) -> list[list[Episode]]:
    """The groups without the answers that have no part in the step: those whose environment failed and, if the
    algorithm learns from rewards, those that no reward could judge, or whose baseline has no score. A player who has
    never moved has no answer at all."""
    compared = required.greedy or (required.rival is not None and not required.rival.trains)

    def is_usable(one: Episode) -> bool:
        judged = one.judged and not (compared and one.baseline is None)
        return not one.error and (judged or not required.reward)

    usable = ([one for one in who_moved(group) if is_usable(one)] for group in groups)
    return [group for group in usable if group]


def refuse_unjudged(groups: Sequence[Sequence[Episode]], step: int) -> NoReturn:
    """Raise LmgymError for a step in which every answer of all draws failed or was not judged, or nobody had a move."""
    answers = [one for group in groups for one in who_moved(group)]
    errors = [error for one in answers for error in (*one.reward_errors.values(), one.error) if error]
    why = f"; the first failure: {errors[0]}" if errors else ""
    count = len(answers)
    if not answers:
        raise LmgymError(
            f"step {step + 1}: each of its {sum(map(len, groups))} games was over before the side that trains had a "
            "move; raise prompts_per_step or max_draws"
        )
    if all(one.error for one in answers):
        raise LmgymError(
            f"step {step + 1}: the environment failed for each of its {count} answers; the first: {errors[0]}"
        )
    raise LmgymError(
        f"step {step + 1}: no reward judged any of its {count} answers (each was None or a failure), "
        f"and max_draws allows no further prompts{why}"
    )


def warn_of_unjudged(stage: StageRun, rewards: Sequence[Reward], episodes: Sequence[Episode], where: str) -> None:
    """Warn of each reward that failed for answers, or could not judge them, when it does so for the first time."""
    for reward in rewards:
        lacking = [e for e in episodes if e.reward_components.get(reward.name, 0.0) is None]
        errors = [error for e in lacking if (error := e.reward_errors.get(reward.name)) is not None]
        if lacking and (reward.name, bool(errors)) not in stage.unjudged:
            stage.unjudged.add((reward.name, bool(errors)))
            why = f"; {len(errors)} went wrong, the first: {errors[0]}" if errors else ""
            stage.run.console.warn(
                f"{where}: reward '{reward.name}' did not judge {len(lacking)} of {len(episodes)} answers, "
                f"which is said once; those that no reward judges are left out (`unjudged` in the log){why}"
            )
