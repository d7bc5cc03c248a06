"""Answers that no reward could judge: they are left out of a step, and warned of."""

from collections.abc import Sequence
from typing import NoReturn

from lmgym.algorithms.requirements import Requirements
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward
from lmgym.training.stage import StageRun
from lmgym.types import Episode


def judged_groups(groups: list[list[Episode]], required: Requirements) -> list[list[Episode]]:
    """The groups without the answers that no reward could judge, which have no part in the step, nor those whose
    baseline could not be judged; all of them, where the algorithm learns from no reward."""
    if not required.reward:
        return groups
    compared = required.greedy or (required.rival is not None and not required.rival.trains)
    judged = ([one for one in group if one.judged and not (compared and one.baseline is None)] for group in groups)
    return [group for group in judged if group]


def refuse_unjudged(groups: Sequence[Sequence[Episode]], step: int) -> NoReturn:
    """Raise LmgymError about a step of which all draws are there, and no answer was judged."""
    errors = [error for group in groups for episode in group for error in episode.reward_errors.values()]
    why = f"; the first failure: {errors[0]}" if errors else ""
    raise LmgymError(
        f"step {step + 1}: no reward judged any of its {sum(map(len, groups))} answers (each was None or a failure), "
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
