"""The loop: gather episodes, turn them into a batch, update the policy, log, evaluate, save.

Every line of it is a public function, so that a user who wants to own the loop writes these lines.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmgym.batch import Batch, collate
from lmgym.config.schema import Config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.logs.console import Console
from lmgym.logs.records import (
    environment_numbers,
    episode_metrics,
    peak_memory_gib,
    rollout_record,
    sampled_tokens,
    version_lag,
)
from lmgym.logs.timings import timing_record
from lmgym.rollouts.given_answers import labelled_steps, rated_answers
from lmgym.rollouts.hints import hinted_episodes
from lmgym.rollouts.play import exchanged, play, play_share
from lmgym.rollouts.rollout import demonstrate, finished_episodes, groups_of
from lmgym.tasks.curriculum import Curriculum
from lmgym.training.beside import add_greedy_baseline, answered_and_given, repeated, with_given, with_rival
from lmgym.training.callbacks import StepEnd
from lmgym.training.evaluation_points import evaluate_now, finish, is_evaluated, record_evaluation
from lmgym.training.run import Run
from lmgym.training.sampler_gap import watch_gap
from lmgym.training.setup import start
from lmgym.training.stage import StageRun, begin_stage, save_checkpoint
from lmgym.training.symptoms import warn_of_symptoms
from lmgym.training.tracing import StepTrace, begin_trace, write_trace
from lmgym.types import Episode, Example
from lmgym.updates.prepare import batch_metrics, prepare
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
    run = stage.run
    if run.config.engine.ahead:  # the generators are done with the old weights before they get new ones
        prompts = first_prompts(stage, stage.step + 1)
        stage.ahead.finish(lambda played: exchanged(run.ranks, played, prompts))
    if isinstance(stage.stream, Curriculum):
        stage.stream.advance()
    run.progress.advance()
    stage.algorithm.after_update(stage)


def gather(stage: StageRun, step: int) -> list[Episode]:
    """All episodes of a step, scored: prompts from the stream, answers from the engine (or the data), rewards,
    and more draws if the algorithm wants them. `Episode.selected` says which ones the algorithm trains on. Raises
    LmgymError if it has rejected every group of all draws."""
    run, algorithm, config = stage.run, stage.algorithm, stage.config
    groups: list[list[Episode]] = []
    if algorithm.requirements.answers == "policy":
        run.renew_engine()
    for draw in range(config.max_draws):
        path = (*stage.path, "step", step, draw)
        numbered = list(enumerate(stage.stream.at(step, draw), start=len(groups)))
        sampled, given = answered_and_given(numbered, algorithm.requirements.given_share, path)
        prompts = repeated(sampled, algorithm.group_size)
        if algorithm.requirements.answers == "rated":
            episodes = rated_answers(prompts, stage.actor)
        elif algorithm.requirements.answers == "steps":
            episodes = labelled_steps(prompts, stage.actor, algorithm.requirements.separator)
        elif algorithm.requirements.answers == "references":
            every_turn = algorithm.requirements.every_turn
            episodes = demonstrate(prompts, stage.actor, path, stage.envs, every_turn)
        elif not draw and (played := stage.ahead.take(step)) is not None:
            episodes = finished_episodes(played)
        else:
            rewards, timeout = stage.rewards, run.config.reward_timeout
            episodes = play(prompts, stage.training_actor, config.sampling, path, stage.envs, rewards, timeout)
        if algorithm.requirements.greedy:
            add_greedy_baseline(stage, episodes, path)
        if algorithm.requirements.rival is not None:
            episodes = with_rival(stage, episodes, path)
        if given:
            episodes = with_given(stage, episodes, given, path)
        groups += groups_of(episodes)
        selected, more = algorithm.select(groups, config.prompts_per_step)
        if not more:
            break
    if not any(selected):
        raise LmgymError(
            f"step {step + 1}: the algorithm rejected every group of {config.max_draws} draws; "
            "raise max_draws, or choose prompts of another difficulty"
        )
    if run.config.engine.ahead and algorithm.requirements.answers == "policy" and step + 1 < config.steps:
        sample_ahead(stage, step + 1)
    if isinstance(stage.stream, Curriculum):
        stage.stream.observe([episode for group in groups for episode in group if not episode.by])
    return mark_selected(groups, selected)


def first_prompts(stage: StageRun, step: int) -> list[tuple[int, Example]]:
    """The group's number and the example of each answer in a step's first draw."""
    numbered, share = list(enumerate(stage.stream.at(step, 0))), stage.algorithm.requirements.given_share
    return repeated(answered_and_given(numbered, share, (*stage.path, "step", step, 0))[0], stage.algorithm.group_size)


def sample_ahead(stage: StageRun, step: int) -> None:
    """Start to play the first draw of a later step with the weights that the engine has now (training/ahead.py)."""
    config, path = stage.config, (*stage.path, "step", step, 0)
    settings = (stage.training_actor, config.sampling, path, stage.envs, stage.rewards, stage.run.config.reward_timeout)
    stage.ahead.begin(step, partial(play_share, first_prompts(stage, step), *settings))


def mark_selected(groups: list[list[Episode]], selected: list[list[Episode]]) -> list[Episode]:
    """The episodes of `groups`, then those that `selected` adds (replay); sets `selected`, `index` and `group`."""
    episodes = [episode for group in groups for episode in group]
    chosen, drawn = {id(e) for group in selected for e in group}, {id(e) for e in episodes}
    for episode in episodes:
        episode.selected = id(episode) in chosen and not episode.error
    number = len(groups)
    for group in selected:
        brought = [episode for episode in group if id(episode) not in drawn]
        for episode in brought:
            episode.group, episode.selected = number, True
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
        temperature=sampling.temperature if required.answers == "policy" else 1.0,
        stop_ids=sorted({*policy.stop_ids, *sampling.stop_ids}),
        key=seeds.key(*stage.path, "update", step),
        limit=sampling.max_new_tokens,
    )
    selected = [episode for episode in episodes if episode.selected]
    batch = build(selected, weights=weights if required.reward_components else None)
    if required.hint is None:
        return batch
    return batch.replace(hinted=build(hinted_episodes(selected, required.hint, stage.actor, stage.teacher_context)))


def log_step(
    stage: StageRun, episodes: list[Episode], batch: Batch, metrics: dict[str, float], trace: StepTrace | None = None
) -> None:
    """Write one record to metrics.jsonl, the tracked answers to rollouts.jsonl, the seconds of all to timings.jsonl and
    the step to traces/, and show a line on the console; warn of what is wrong with them. Without the `trace` that has
    watched the update, traces/ lacks what the update has computed. Tokens per second are sampled tokens in the rollout
    and all tokens of the batch in the update; memory is the GPU's if the policy is on one. Raises LmgymError if sampler
    and trainer are too far apart."""
    now, run, step = time.perf_counter(), stage.run, stage.step - 1
    ahead = run.config.engine.ahead
    if not ahead:  # else older weights have sampled
        watch_gap(run.gap_limits, metrics, batch, step, run.console.warn)
    position = {"kind": "train", "stage": stage.index, "stage_name": stage.config.name, "step": step}
    version = run.progress.version - 1
    # The others were replayed, or are not the policy's; where all are of the data, they are what there is to tell.
    fresh = [one for one in episodes if one.version >= version - ahead]
    fresh = [one for one in fresh if not one.by] or fresh
    record: dict[str, Any] = position | episode_metrics(fresh) | batch_metrics(batch) | metrics
    record |= version_lag(episodes, version)
    if isinstance(stage.stream, Curriculum):
        record |= stage.stream.metrics()
    on_gpu = run.policy.device.type == "cuda"
    rollout, learning = stage.gathered - stage.began, now - stage.gathered
    record |= {
        "learning_rate": stage.optimizer.learning_rate,
        "seconds": rollout + learning,
        "seconds/rollout": rollout,
        "seconds/update": learning,
        "tokens_per_second/rollout": sampled_tokens(fresh) / rollout if rollout else math.nan,
        "tokens_per_second/update": float(batch.mask.sum()) / learning,
        "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else peak_memory_gib(),
    }
    required = stage.algorithm.requirements
    if unlimited := [reward.name for reward in stage.rewards if reward.unlimited]:
        record["rewards_without_limit"] = unlimited
    if required.answers != "policy" or not (stage.rewards or required.reward):
        del record["reward"]  # no reward has judged the answers
    if stage.config.sampling.fixed_length:
        del record["truncated"]
    record |= run.callbacks.on_step(StepEnd(stage.config.name, step, episodes, batch, record))
    run.writer.metrics(record)
    tracked = groups_of(episodes)[0]
    recorded = episodes if run.config.logs.rollouts == "all" else tracked
    run.writer.rollouts(position | rollout_record(episode) for episode in recorded)
    if required.answers == "policy":
        run.writer.timings(position | timing_record(episodes))
        run.writer.answers(position | rollout_record(episode) for episode in tracked)
    trace = trace or begin_trace(stage, episodes, batch, step)
    if trace is not None:
        write_trace(stage, episodes, batch, trace)
    run.console.step(record, step, stage.config.steps)
    warn_of_failures(stage, fresh, step)
    warn_of_symptoms(stage, record, tracked)


def warn_of_failures(stage: StageRun, episodes: list[Episode], step: int) -> None:
    """Warn of environments that failed, and of answers that were cut off."""
    console, sampling = stage.run.console, stage.config.sampling
    failed = [episode.error for episode in episodes if episode.error]
    if failed:
        count = len(failed)
        console.warn(f"step {step + 1}: {count} environments failed and were left out; the first one: {failed[0]}")
    full = sum(episode.overflowed for episode in episodes)
    if full > 0.1 * len(episodes):
        console.warn(
            f"step {step + 1}: {full} of {len(episodes)} episodes filled the model's context "
            f"({stage.run.engine.context} tokens) and were cut off there; lower env.max_turns or "
            "sampling.max_new_tokens, shorten what the environment writes, or take a model with a longer context"
        )
    invalid = environment_numbers(episodes).get("invalid", [])
    if invalid and min(invalid) > 0:
        console.warn(
            f"step {step + 1}: not one of {len(invalid)} answers was a valid action of the environment; the model does "
            "not know the form of an action, or the agent does not read it (`lmgym check` shows an answer)"
        )
    # An environment may well take what was cut off: a move of one token is a move.
    cut = [episode for episode in episodes if any(turn.stop == "length" for turn in episode.turns)]
    unended = sum(not episode.terminated for episode in cut)
    if unended > 0.5 * len(episodes) and not sampling.fixed_length:
        console.warn(
            f"more than half of a step's answers were cut off at sampling.max_new_tokens "
            f"({sampling.max_new_tokens}); they never came to an end, so their rewards may mean little"
        )


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
        progress.evaluations = {key: progress.evaluations[key] for key in ("best",) if key in progress.evaluations}
        save_checkpoint(stage)
