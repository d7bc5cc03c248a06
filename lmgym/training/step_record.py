"""What metrics.jsonl says of a step."""

import math
import time
from typing import Any

import torch

from lmgym.batch import Batch
from lmgym.logs.records import episode_metrics, peak_memory_gib, sampled_tokens, version_lag
from lmgym.training.stage import StageRun
from lmgym.types import Episode
from lmgym.updates.checks import refuse_taken
from lmgym.updates.prepare import batch_metrics


def fresh_episodes(stage: StageRun, episodes: list[Episode]) -> list[Episode]:
    """Those that the policy sampled for this step; the others were replayed, or are a rival's or the data's (which are
    all that there is to tell of a step without any of its own)."""
    oldest = stage.run.progress.version - 1 - stage.source.lag
    fresh = [episode for episode in episodes if episode.version >= oldest]
    return [episode for episode in fresh if not episode.by] or fresh


def step_record(stage: StageRun, episodes: list[Episode], batch: Batch, metrics: dict[str, float]) -> dict[str, Any]:
    """What metrics.jsonl says of a step that is done: its place, its answers, its batch, the `metrics` of its update,
    and what it cost. A metric may replace what is estimated of the batch, as an exact entropy does. Raises LmgymError
    for one that would replace anything else, or be replaced."""
    fresh = fresh_episodes(stage, episodes)
    answers, costs = stage.position(stage.step - 1) | episode_metrics(fresh), _costs(stage, episodes, fresh, batch)
    refuse_taken(stage.algorithm, metrics, {*answers, *costs}, "the step's record")
    record: dict[str, Any] = answers | batch_metrics(batch) | metrics | costs
    if not stage.source.samples or not (stage.rewards or stage.algorithm.requirements.reward is True):
        del record["reward"]  # no reward has judged the answers
    if stage.config.sampling.fixed_length:
        del record["truncated"]
    return record


def _costs(stage: StageRun, episodes: list[Episode], fresh: list[Episode], batch: Batch) -> dict[str, Any]:
    """Ages, the learning rate, times and memory. Tokens per second are sampled tokens in the rollout and all tokens of
    the batch in the update; memory is the GPU's if the policy is on one."""
    run, now = stage.run, time.perf_counter()
    rollout, learning = stage.gathered - stage.began, now - stage.gathered
    on_gpu = run.policy.device.type == "cuda"
    costs: dict[str, Any] = version_lag(episodes, run.progress.version - 1) | stage.stream.metrics()
    costs |= {} if run.policy.seen is None else {"weights/seen": run.policy.seen}
    costs |= {
        "learning_rate": stage.optimizer.learning_rate,
        "seconds": rollout + learning,
        "seconds/rollout": rollout,
        "seconds/update": learning,
        "tokens_per_second/rollout": sampled_tokens(fresh) / rollout if rollout else math.nan,
        "tokens_per_second/update": float(batch.mask.sum()) / learning,
        "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else peak_memory_gib(),
    }
    if (budget := run.config.policy.memory_gib) is not None:
        costs["memory/budget_gib"] = budget
    if unlimited := [reward.name for reward in stage.rewards if reward.unlimited]:
        costs["rewards_without_limit"] = unlimited
    return costs
