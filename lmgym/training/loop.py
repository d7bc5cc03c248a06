"""The loop: gather episodes, turn them into a batch, update the policy, log, evaluate, save.

Every line of it is a public function, so that a user who wants to own the loop writes these lines."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch, collate
from lmgym.config.schema import Config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.logs.console import Console
from lmgym.logs.records import rollout_record
from lmgym.logs.timings import timing_record
from lmgym.rewards.champions import crown
from lmgym.rewards.normalisation import normalise
from lmgym.rollouts.play import who_moved
from lmgym.rollouts.rollout import groups_of
from lmgym.training.begin_stage import begin_stage
from lmgym.training.beside import add_greedy_baseline, with_given, with_rival
from lmgym.training.callbacks import StepEnd
from lmgym.training.evaluation_points import evaluate_now, finish, is_evaluated, record_evaluation
from lmgym.training.resuming.differences import measures_alike
from lmgym.training.reward_watch import watch_rewards
from lmgym.training.run import Run
from lmgym.training.sampler_gap import watch_gap
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.training.stage_checkpoint import save_checkpoint
from lmgym.training.step_record import fresh_episodes, step_record
from lmgym.training.symptoms import warn_of_failures, warn_of_symptoms
from lmgym.training.teacher_rows import with_teacher_rows
from lmgym.training.tracing import StepTrace, begin_trace, write_trace
from lmgym.training.unjudged import refuse_unjudged, usable_groups
from lmgym.types import Episode
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update


def train(config: Config, console: Console | None = None, ranks: Ranks = ALONE) -> Path:
    """Train all stages of a config and return the run folder; resumes if the folder holds a run. Raises LmgymError for
    anything that the user can mend. Ctrl-C (or SIGTERM) finishes the step, saves and returns. `ranks` are the processes
    that train it together: under torchrun, `ranks_of_environment()` (distributed/process_group.py).
    Example: train(load_config("quickstart", ["out=runs/mine"]))"""
    with start(config, console, ranks) as run:
        for stage in stages_left(run):
            train_stage(stage)
        finish(run)
    return run.folder


def train_stage(stage: StageRun) -> None:
    """The loop: all steps that a stage has left, with its evaluations and checkpoints."""
    run = stage.run
    evaluate_before(stage)
    for step in stage.steps_left():
        begin_step(stage, step)
        episodes = gather(stage, step)
        batch = collate_step(stage, episodes, step)
        batch = prepare(batch, run.policy, stage.frozen_models.models, stage.algorithm)
        trace = begin_trace(stage, episodes, batch, step)
        metrics = update(stage.algorithm, run.policy, batch, stage.optimizer, trace)
        advance(stage)
        log_step(stage, episodes, batch, metrics, trace)
        evaluate_and_save_when_due(stage)
    end_stage(stage)


def stages_left(run: Run) -> Iterator[StageRun]:
    """The stages that a run has left, each begun when its turn comes and closed after it; none after Ctrl-C. Each must
    be ended with `end_stage`. A finished run has its last stage left, without a step."""
    for _ in range(run.progress.stage_index, len(run.config.stages)):
        if run.agree_to_stop():
            return
        with begin_stage(run) as stage:
            yield stage


def evaluate_before(stage: StageRun) -> None:
    """Evaluate at the beginning of a stage, before its first step; nothing if the stage goes on from a checkpoint."""
    if not stage.run.progress.begun:
        evaluate_now(stage)
        if stage.run.last_stage:
            record_evaluation(stage, "before")


def begin_step(stage: StageRun, step: int) -> None:
    """Set what depends on the number of the step, the learning rate first of all, and start its clock."""
    stage.run.settings.hold(stage.run.console)
    stage.began = stage.gathered = time.perf_counter()
    stage.algorithm.progress = step / stage.config.steps
    stage.optimizer.set_step(step, stage.config.steps)


def advance(stage: StageRun) -> None:
    """Count the step after its update: the next answers are the new policy's (`gather` and the evaluations renew the
    engine), and the algorithm does what it does after an update (a new reference, a moving baseline)."""
    stage.source.finish(stage.step + 1)  # before the generators get new weights
    stage.stream.advance()
    stage.run.progress.advance()
    stage.run.policy.had_updates(stage.run.progress.version)
    stage.algorithm.after_update(stage)


def gather(stage: StageRun, step: int) -> list[Episode]:
    """All episodes of a step, scored: prompts from the stream, answers from the engine (or the data), rewards,
    and more draws if the algorithm wants them, or if no answer was judged. `Episode.selected` says which ones the
    algorithm trains on. Raises LmgymError if it has rejected every group of all draws."""
    groups, selected = drawn_groups(stage, step)
    stage.source.begin_ahead(stage.draw, step, stage.config.steps)
    stage.run.engine.release()
    stage.stream.observe([episode for group in groups for episode in group if not episode.by])
    return mark_selected(groups, selected)


def drawn_groups(stage: StageRun, step: int) -> tuple[list[list[Episode]], list[list[Episode]]]:
    """The groups of all draws of a step, until the algorithm wants no more, and those that it selects. It is shown the
    answers that were played to their end and judged. A player who has never moved has no answer, and is in neither."""
    algorithm, config, required = stage.algorithm, stage.config, stage.algorithm.requirements
    groups, usable, selected = list[list[Episode]](), list[list[Episode]](), list[list[Episode]]()
    if stage.source.samples:
        stage.run.renew_engine()
    for number in range(config.max_draws):
        draw = stage.draw(step, number, first_group=len(groups))
        episodes = stage.source.episodes(draw)
        if stage.source.samples:
            crown(episodes, stage.rewards, stage.champions)
            normalise(episodes, stage.rewards, stage.moments)
        if required.greedy or required.rival is not None:
            stage.source.settle()
        if required.greedy:
            add_greedy_baseline(episodes, replace(draw, actor=stage.actor), stage.moments)
        if required.rival is not None:
            episodes = with_rival(stage, episodes, draw)
        if given := stage.given(step, number, first_group=len(groups)):
            episodes = with_given(episodes, replace(draw, prompts=given))
        groups += groups_of(episodes)
        usable = usable_groups(groups, required)
        selected, more = selection(algorithm, usable, config.prompts_per_step) if usable or not groups else ([], True)
        if not more:
            break
    if groups and not usable:
        refuse_unjudged(groups, step)
    if not any(selected):
        raise LmgymError(
            f"step {step + 1}: the algorithm rejected every group of {config.max_draws} draws; "
            "raise max_draws, or choose prompts of another difficulty"
        )
    return [moved for group in groups if (moved := who_moved(group))], selected


def selection(algorithm: Algorithm, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
    """What `algorithm.select` returns. Raises LmgymError for what is no pair of groups and a truth value, and for an
    episode that is selected twice, which would train once."""
    name, answer = type(algorithm).__name__, algorithm.select(groups, wanted)
    try:
        selected, more = answer
        selected = [list(group) for group in selected]
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"{name}.select returned a {type(answer).__name__} that is no pair of groups of episodes and whether to "
            "draw more; return both"
        ) from error
    chosen = [id(episode) for group in selected for episode in group]
    if len({*chosen}) < len(chosen):
        raise LmgymError(f"{name}.select returned an episode twice; return each one once")
    return selected, bool(more)


def mark_selected(groups: list[list[Episode]], selected: list[list[Episode]]) -> list[Episode]:
    """The episodes of `groups`, then those that `selected` adds (replay); sets `selected`, `index` and `group`."""
    episodes = [episode for group in groups for episode in group]
    chosen, drawn = {id(e) for group in selected for e in group}, {id(e) for e in episodes}
    for episode in episodes:
        episode.selected = id(episode) in chosen and not episode.error
    number = max((episode.group for episode in episodes), default=-1) + 1
    for group in selected:
        brought = [episode for episode in group if id(episode) not in drawn]
        for episode in brought:
            episode.group, episode.selected = number, not episode.error  # of a buffer that an older version has kept
        episodes += brought
        number += bool(brought)
    for index, episode in enumerate(episodes):
        episode.index = index
    return episodes


def collate_step(stage: StageRun, episodes: list[Episode], step: int) -> Batch:
    """The batch of the selected episodes, with the temperature and stop ids that their actions were sampled under. In
    the step's times the rollout ends here."""
    stage.gathered = time.perf_counter()
    stage.run.settings.hold(stage.run.console)  # rewards and environments may have changed them
    policy, sampling, required = stage.run.policy, stage.config.sampling, stage.algorithm.requirements
    weights = {reward.name: reward.weight for reward in stage.rewards}
    build = partial(
        collate,
        pad_id=policy.pad_id,
        temperature=sampling.temperature if stage.source.samples else 1.0,
        stop_ids=sorted({*policy.stop_ids, *sampling.stop_ids}),
        key=seeds.key(*stage.path, "update", step),
        limit=sampling.max_new_tokens,
    )
    selected = [episode for episode in episodes if episode.selected]
    return with_teacher_rows(stage, selected, build, weights if required.reward_components else None)


def log_step(
    stage: StageRun, episodes: list[Episode], batch: Batch, metrics: dict[str, float], trace: StepTrace | None = None
) -> None:
    """Write one record to metrics.jsonl, the tracked answers to rollouts.jsonl, the seconds of all to timings.jsonl and
    the step to traces/, and show a line on the console; warn of what is wrong with them. Without the `trace` that has
    watched the update, traces/ lacks what the update has computed. Raises LmgymError if sampler and trainer are too far
    apart, and if the run folder is not where it was."""
    run, step = stage.run, stage.step - 1
    record = step_record(stage, episodes, batch, metrics) | watch_rewards(stage, episodes, step)
    if not stage.source.lag:  # else older weights have sampled
        watch_gap(run.gap_limits, metrics, batch, step, run.console.warn)
    record |= run.callbacks.on_step(StepEnd(stage.config.name, step, episodes, batch, record))
    tracked = groups_of(episodes)[0]
    run.check_in_place()
    write_step(stage, episodes, tracked, record)
    trace = trace or begin_trace(stage, episodes, batch, step)
    if trace is not None:
        write_trace(stage, episodes, batch, trace)
    run.console.step(record, step, stage.config.steps)
    warn_of_failures(stage, fresh_episodes(stage, episodes), step)
    warn_of_symptoms(stage, record, tracked)


def write_step(stage: StageRun, episodes: list[Episode], tracked: list[Episode], record: dict[str, Any]) -> None:
    """Write a step's record, its answers and their times."""
    writer, position = stage.run.writer, stage.position(stage.step - 1)
    writer.metrics(record)
    recorded = episodes if stage.run.config.logs.rollouts == "all" else tracked
    writer.rollouts(position | rollout_record(episode) for episode in recorded)
    if stage.source.samples:
        writer.timings(position | timing_record(episodes))
        writer.answers(position | rollout_record(episode) for episode in tracked)


def evaluate_and_save_when_due(stage: StageRun) -> None:
    """After a step: evaluate and save as often as the recipe says."""
    config, step, last = stage.run.config, stage.step, stage.step == stage.config.steps
    if last or is_due(config.evaluation.every, step):
        evaluate_now(stage)
    if is_due(config.checkpoint.every, step) and not last:
        save_checkpoint(stage)


def is_due(every: int, step: int) -> bool:
    """True every so many steps; never, if `every` is 0."""
    return every > 0 and step % every == 0


def end_stage(stage: StageRun) -> None:
    """Save at the boundary: the next stage starts at step 0 with a new optimizer; the last stage can be continued.
    After Ctrl-C only save: the stage goes on when the run is resumed. Before the first step there is nothing to save:
    the stage begins again, with its first evaluation."""
    run, progress = stage.run, stage.run.progress
    if run.agree_to_stop():
        if stage.step > 0:
            save_checkpoint(stage)
        return
    if not is_evaluated(stage, "newest", run.config.evaluation.split):
        evaluate_now(stage)
    if run.last_stage:
        record_evaluation(stage, "after")
        save_checkpoint(stage)
    progress.stage_index += 1
    if progress.stage_index < len(run.config.stages):
        progress.step = 0
        progress.evaluations = _kept_best(run)
        save_checkpoint(stage)


def _kept_best(run: Run) -> dict[str, Any]:
    """What a new stage keeps of the evaluations of the one before: the best model's, marked where it was measured in
    another way. Then the stage's first evaluation makes another best model."""
    index, metric = run.progress.stage_index, run.config.evaluation.keep_best
    best = run.progress.evaluations.get("best")
    if best is None:
        return {}
    if best.get("comparable", True) and not measures_alike(run.fingerprint, index - 1, index, metric):
        name = run.config.stages[index].name
        run.console.say(f"stage '{name}' measures {metric} in another way, so its first evaluation begins best/ anew")
        best = {**best, "comparable": False}
    return {"best": best}
