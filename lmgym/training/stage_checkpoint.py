"""The checkpoints of a stage: what is written of it, and how a resumed one takes it over."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, describe
from lmgym.core.progress import doing
from lmgym.models import copies
from lmgym.rewards.champions import restore
from lmgym.rewards.normalisation import Moments
from lmgym.training.checkpoints import checkpoint
from lmgym.training.checkpoints.moments import load_optimizer, moments_of
from lmgym.training.stage import StageRun


@doing("saving a checkpoint")
def save_checkpoint(stage: StageRun) -> None:
    """Write a checkpoint of the run as it is now and delete the oldest. Only the first rank writes; all take part, as
    each may hold a part of the weights. Raises LmgymError if the run folder is not where it was."""
    run, progress = stage.run, stage.run.progress
    run.check_in_place()
    run.settings.hold(run.console)  # callbacks may have changed them
    begun = progress.step > 0  # else the next stage begins, with its own optimizer and algorithm
    stage.source.settle()
    policy = copies.gathered(run.policy)
    moments = moments_of(stage.optimizer.torch, keep=run.ranks.first) if begun else {}
    if begun:
        stage.frozen_models.save()
    if policy is None:
        return
    state = {
        "stage": progress.stage_index,
        "step": progress.step,
        "steps": run.config.stages[progress.stage_index].steps,
        "version": progress.version,
        "progress": progress.evaluations,
        "copies": stage.frozen_models.taken if begun else {},
        "teacher": stage.frozen_models.teacher if begun else None,
        "records": dict(run.writer.counts),
    }
    if begun and stage.moments:
        state["moments"] = {name: asdict(moments) for name, moments in stage.moments.items()}
    if begun and (order := stage.stream.state_dict()):
        state["curriculum"] = order
    if states := run.callbacks.state_dict():
        state["callbacks"] = states
    run.writer.sync()  # the records are on the disk before the checkpoint that counts them
    if run.traces is not None:
        run.traces.sync()
    algorithm = stage.algorithm.state_dict() if begun else {}
    seats = {name: champions.seats for name, champions in stage.champions.items()}
    parts = {"ahead": stage.source.state_dict(), "champions": seats} if begun else {}
    saved = checkpoint.save(run.folder / "checkpoints", policy, moments, algorithm, state, run.fingerprint, parts)
    stage.frozen_models.prune(_readable_states(checkpoint.prune(saved, run.config.checkpoint.keep)))
    run.callbacks.on_save(saved)


def _readable_states(saved: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The states of checkpoints, without those of damaged ones, which no run can go on from."""
    for path in saved:
        with suppress(LmgymError):
            yield checkpoint.read_state(path)


def restore_stage(stage: StageRun, saved: Path) -> None:
    """Take over the optimizer's and the algorithm's state of a checkpoint. Raises LmgymError for one of another
    algorithm or that is damaged."""
    load_optimizer(saved, stage.optimizer.torch)
    try:
        stage.algorithm.load_state_dict(checkpoint.read_algorithm(saved))
    except (KeyError, TypeError) as error:
        raise LmgymError(
            f"{saved / 'algorithm.json'} is not a state of this algorithm ({error}): another version of lmgym may have "
            "written it; start the run anew in another folder"
        ) from error
    for name, take, what in (
        ("ahead", stage.source.load_state_dict, "answers of a step"),
        ("champions", partial(restore, stage.champions), "answers by prompt"),
    ):
        try:
            take(checkpoint.read_part(saved, name))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LmgymError(
                f"{saved / f'{name}.json'} holds no {what} ({describe(error)}); put it back, or delete the checkpoint "
                "to go on from the one before"
            ) from error
    state, config = checkpoint.read_state(saved), stage.config
    stage.moments |= {name: Moments(**known) for name, known in state.get("moments", {}).items()}
    stage.stream.load_state_dict(state.get("curriculum", {}))
    steps = state["steps"]
    if steps != config.steps and config.optimizer.depends_on_steps:
        stage.run.console.warn(
            f"stage {config.name} now has {config.steps} steps instead of {steps}, so its {config.optimizer.schedule} "
            f"learning rate jumps to where the new curve stands after step {stage.step}"
        )
