"""Evaluation: answers to held-out prompts, every reward as a metric, with 95 % confidence intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmgym.batch import collate
from lmgym.engines.base import Sampling
from lmgym.envs.base import Env
from lmgym.episode import Episode, Example
from lmgym.rewards.base import Reward
from lmgym.rollout import Speaker, collect, demonstrate, groups_of, score
from lmgym.statistics import Interval, mean_interval, pass_at_k_mean


@dataclass(kw_only=True)
class EvaluationSection:
    """The `evaluation:` section of a recipe."""

    every: int = 20
    """Steps between evaluations; there is always one at the start and one at the end of each stage. 0: only those."""
    split: str = "test"
    """Held-out split of the evaluations on the way, which early stopping and keep_best look at."""
    final_split: str | None = None
    """Another split for the before-and-after table, so that its numbers have not been selected on."""
    examples: int = 256
    """Held-out prompts (all of them, where there are fewer)."""
    samples: int = 1
    """Answers per prompt; with more than one, pass@k is reported too."""
    temperature: float = 0.0
    """0 is greedy."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """As `rewards:`; these are reported besides the stage's own rewards."""
    task: dict[str, Any] | None = None
    """Evaluate on this task instead of the last stage's."""
    keep_best: str | None = None
    """A metric; the model that scored highest on it is kept in the run folder's best/."""


@dataclass(frozen=True)
class Evaluation:
    """Results by metric, and the answers behind them.

    Example: evaluation.results["final_answer"] -> Interval(mean=0.61, low=0.57, high=0.65, count=512)
    """

    results: dict[str, Interval]
    episodes: list[Episode]


def evaluate(
    examples: Sequence[Example],
    speaker: Speaker,
    sampling: Sampling,
    rewards: Sequence[Reward],
    make_env: Callable[[], Env],
    seed: int = 0,
    samples: int = 1,
    timeout: float = 60.0,
) -> Evaluation:
    """Answer each example `samples` times and score the answers.

    Random numbers are a function of (seed, place), not of the training step, so that two evaluations of the same
    examples are paired. Intervals: Wilson where each prompt has one answer scored 0 or 1, else a bootstrap over
    prompts.
    """
    prompts = [(group, example) for group, example in enumerate(examples) for _ in range(samples)]
    episodes = collect(prompts, speaker, sampling, (seed, "evaluation"), make_env)
    score(episodes, rewards, timeout)
    groups = groups_of(episodes)
    results = {"reward": mean_interval([[episode.score for episode in group] for group in groups])}
    for reward in rewards:
        values = [[episode.parts[reward.name] for episode in group] for group in groups]
        results[reward.name] = mean_interval(values)
        if samples > 1 and all(value in (0.0, 1.0) for group in values for value in group):
            for k in sorted(
                {2**power for power in range(samples.bit_length())} & set(range(1, samples + 1)) | {samples}
            ):
                results[f"{reward.name}/pass@{k}"] = pass_at_k_mean(values, k)
    lengths = [[float(sum(len(turn.action_ids) for turn in episode.turns)) for episode in group] for group in groups]
    results["length/mean"] = mean_interval(lengths)  # tokens; "length" is a reward
    results["truncated"] = mean_interval([[float(episode.truncated) for episode in group] for group in groups])
    return Evaluation(results, episodes)


@torch.no_grad()
def reference_nll(examples: Sequence[Example], speaker: Speaker, policy: Any, seed: int = 0) -> Interval:
    """Mean negative log-likelihood (nats per token) of the held-out references; the interval is a bootstrap over
    examples of their per-token means."""
    episodes = demonstrate(list(enumerate(examples)), speaker, (seed, "evaluation"))
    batch = collate(episodes, policy.pad_id)
    logprobs = policy.logprobs(batch)
    means = -(logprobs * batch.actions).sum(1) / batch.actions.sum(1)
    return mean_interval([[value] for value in np.asarray(means, dtype=float).tolist()])
