"""The loop: gather episodes, turn them into a batch, update the policy, log, evaluate, save.

Every line of it is a public function, so that a user who wants to own the loop writes these lines.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmgym.batch import Batch, collate
from lmgym.config.schema import Config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.records import episode_metrics, peak_memory_gib, rollout_record, sampled_tokens
from lmgym.rewards.streaming import background_scoring
from lmgym.rollouts.rollout import apply_rewards, collect, demonstrate, groups_of
from lmgym.training.evaluation_points import evaluate_now, finish, is_evaluated, record_evaluation
from lmgym.training.run import Run, begin_stage, save, start
from lmgym.types import Episode
from lmgym.updates.first_order import batch_metrics, prepare


def train(config: Config, console: Console | None = None) -> Path:
    """Run all stages of a config, resuming if its folder holds a run; returns the run folder.

    Raises LmgymError for anything that the user can mend. Ctrl-C (or SIGTERM) finishes the step, saves and returns.

    Example: train(load_config("lmgym/recipes/quickstart.yaml", ["out=runs/mine"]))
    """
    with console or Console() as console:
        run = start(config, console)
        with run.lock, run.writer, stop_signals(run):
            while run.stage_index < len(config.stages) and not run.interrupted:
                begin_stage(run)
                if run.step == 0:
                    evaluate_now(run)
                    if run.last_stage:
                        record_evaluation(run, "before")
                for step in range(run.step, run.stage.steps):
                    if run.interrupted or run.progress.get("stop"):
                        break
                    began, run.algorithm.progress = time.perf_counter(), step / run.stage.steps
                    episodes = gather(run, step)
                    gathered = time.perf_counter()
                    batch = prepare(collate_step(run, episodes, step), run.policy, run.copies.models, run.algorithm)
                    rate = run.optimizer.set_step(step, run.stage.steps)
                    metrics = run.algorithm.update(run.policy, batch, run.optimizer)
                    run.step, run.version = step + 1, run.version + 1
                    run.engine.load(run.policy, run.version)
                    run.algorithm.after_update(run)
                    log_step(run, episodes, batch, {**metrics, "learning_rate": rate}, began, gathered)
                    evaluate_and_save_when_due(run)
                if run.interrupted:
                    save(run)
                else:
                    end_stage(run)
            finish(run)
            run.close_envs()
    return run.folder


def gather(run: Run, step: int) -> list[Episode]:
    """All episodes of a step, scored: prompts from the stream, answers from the engine (or the references), rewards,
    and more draws where the algorithm wants them. `Episode.selected` says which ones it has selected."""
    groups: list[list[Episode]] = []
    for draw in range(run.stage.max_draws):
        numbered = enumerate(run.stream.at(step, draw), start=len(groups))
        prompts = [(number, example) for number, example in numbered for _ in range(run.algorithm.group_size)]
        path = (*run.path, "step", step, draw)
        if "demonstrations" in run.algorithm.needs:
            episodes = demonstrate(prompts, run.actor, path, run.envs)
        else:
            beside = background_scoring(run.rewards)
            episodes = collect(prompts, run.training_actor, run.stage.sampling, path, run.envs, beside)
            apply_rewards(episodes, run.rewards, run.config.reward_timeout, run.policy.tokenizer)
        if "greedy" in run.algorithm.needs:
            add_greedy_baseline(run, episodes, path)
        groups += groups_of(episodes)
        selected, more = run.algorithm.select(groups, run.stage.prompts_per_step)
        if not more:
            break
    if not any(selected):
        raise LmgymError(
            f"step {step}: the algorithm rejected every group of {run.stage.max_draws} draws; "
            "raise max_draws, or choose prompts of another difficulty"
        )
    return mark_selected(groups, selected)


def mark_selected(groups: list[list[Episode]], selected: list[list[Episode]]) -> list[Episode]:
    """The episodes of `groups`, then those that an algorithm has brought from elsewhere (replay), with `selected`,
    `index` and the latters' `group` filled in."""
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


def add_greedy_baseline(run: Run, episodes: list[Episode], path: tuple[int | str, ...]) -> None:
    """Score the greedy answer to each group's prompt and note it on the group's episodes."""
    groups = groups_of(episodes)
    prompts = [(group[0].group, group[0].example) for group in groups]
    greedy = collect(prompts, run.actor, replace(run.stage.sampling, temperature=0.0), (*path, "greedy"), run.envs)
    if len(greedy) != len(groups):
        raise LmgymError(
            "the baseline is a greedy answer to the group's prompt, and a game of several players has none of its own; "
            "take another baseline"
        )
    apply_rewards(greedy, run.rewards, run.config.reward_timeout, run.policy.tokenizer)
    for group, answer in zip(groups, greedy, strict=True):
        for episode in group:
            episode.baseline = answer.score


def collate_step(run: Run, episodes: list[Episode], step: int) -> Batch:
    """The batch of the selected episodes, with the temperature and stop ids that their actions were sampled under."""
    sampled = "demonstrations" not in run.algorithm.needs
    return collate(
        [episode for episode in episodes if episode.selected],
        pad_id=run.policy.pad_id,
        temperature=run.stage.sampling.temperature if sampled else 1.0,
        stop_ids=sorted({*run.policy.stop_ids, *run.stage.sampling.stop_ids}),
        key=seeds.key(*run.path, "update", step),
        limit=run.stage.sampling.max_new_tokens,
        weights={reward.name: reward.weight for reward in run.rewards}
        if "reward_components" in run.algorithm.needs
        else None,
    )


def log_step(
    run: Run, episodes: list[Episode], batch: Batch, metrics: dict[str, float], began: float, gathered: float
) -> None:
    """One record to metrics.jsonl, the tracked answers to rollouts.jsonl, one line to the person watching.

    Tokens per second are sampled ones in the rollout and all real ones in the update; memory is the GPU's where there
    is one.
    """
    now, step = time.perf_counter(), run.step - 1
    place = {"kind": "train", "stage": run.stage_index, "stage_name": run.stage.name, "step": step}
    fresh = [episode for episode in episodes if episode.version == run.version - 1]  # the others were replayed
    record: dict[str, Any] = place | episode_metrics(fresh) | batch_metrics(batch) | metrics
    on_gpu = run.policy.device.type == "cuda"
    record |= {
        "seconds": now - began,
        "seconds/rollout": gathered - began,
        "seconds/update": now - gathered,
        "tokens_per_second/rollout": sampled_tokens(fresh) / (gathered - began),
        "tokens_per_second/update": float(batch.mask.sum()) / (now - gathered),
        "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else peak_memory_gib(),
    }
    if "demonstrations" in run.algorithm.needs or not (run.rewards or run.algorithm.rewarded):
        del record["reward"]  # nobody judged the answers
    run.writer.metrics(record)
    tracked = episodes if run.config.logs.rollouts == "all" else groups_of(episodes)[0]
    run.writer.rollouts([place | rollout_record(episode) for episode in tracked])
    run.console.step(record, step, run.stage.steps)
    failed = [episode.error for episode in fresh if episode.error]
    if failed:
        count = len(failed)
        run.console.warn(f"step {step}: {count} environments failed and were left out; the first one: {failed[0]}")
    sampling = run.stage.sampling
    # An environment may well take what was cut off: a move of one token is a move.
    unended = sum(episode.truncated and not episode.terminated for episode in fresh)
    if unended > 0.5 * len(fresh) and sampling.min_new_tokens < sampling.max_new_tokens:
        run.console.warn(
            f"more than half of a step's answers were cut off at sampling.max_new_tokens "
            f"({sampling.max_new_tokens}); they never came to an end, so their rewards may mean little"
        )


def evaluate_and_save_when_due(run: Run) -> None:
    """After a step: evaluate and save where the recipe says so."""
    last = run.step == run.stage.steps
    every = run.config.evaluation.every
    if last or (every and run.step % every == 0):
        evaluate_now(run)
    every = run.config.checkpoint.every
    if every and run.step % every == 0 and not last:
        save(run)


def end_stage(run: Run) -> None:
    """Save at the boundary: another stage starts at step 0 with a fresh optimizer, the last one can still be
    extended."""
    if not is_evaluated(run, "newest", run.config.evaluation.split):
        evaluate_now(run)
    if run.last_stage:
        record_evaluation(run, "after")
        save(run)
    run.stage_index += 1
    if run.stage_index < len(run.config.stages):
        run.step = 0
        run.progress = {key: run.progress[key] for key in ("best",) if key in run.progress}
        save(run)


@contextmanager
def stop_signals(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the loop to stop after the step in flight; a second one stops at once and loses it."""

    def ask(number: int, frame: Any) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True
        run.console.say("stopping after this step; once more to stop at once, without it")

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not in the main thread: whoever called us has the signals
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
