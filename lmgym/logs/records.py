"""Turns episodes into records for the log files: metrics of a step, and the answers themselves."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lmgym.types import Episode, Turn


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of the episodes sampled in a step: the mean of the reward and of its components, lengths (tokens), mean
    number of turns (if any episode has several), the shares of truncated and of selected episodes, the share whose
    environment failed (if any), and of groups with equal scores, from which a group baseline learns nothing.

    Example: {"reward": 0.53, "reward/final_answer": 0.5, "length/mean": 4.2, "length/max": 8.0, "truncated": 0.0}
    """
    count = len(episodes)
    lengths = [sampled_tokens([episode]) for episode in episodes]
    # Scores of each group, for the share of groups without a difference.
    scores: dict[int, list[float]] = {}
    for episode in episodes:
        scores.setdefault(episode.group, []).append(episode.score)
    groups = list(scores.values())
    components = {n: sum(e.reward_components[n] for e in episodes) / count for n in episodes[0].reward_components}
    return {
        "reward": sum(episode.score for episode in episodes) / count,
        **{f"reward/{name}": value for name, value in components.items()},
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths)),
        "truncated": sum(episode.truncated for episode in episodes) / count,
        "selected": sum(episode.selected for episode in episodes) / count,
        **({"environment_errors": broken / count} if (broken := sum(bool(e.error) for e in episodes)) else {}),
        **({"turns/mean": turns / count} if (turns := sum(len(e.turns) for e in episodes)) > count else {}),
        **(
            {"zero_variance_groups": sum(min(g) == max(g) for g in groups) / len(groups)} if len(groups) < count else {}
        ),
    }


def rollout_record(episode: Episode) -> dict[str, Any]:
    """An episode as a record of rollouts.jsonl: texts, sampled ids, rewards, and why each turn stopped."""
    return {
        "example": episode.example.id,
        "group": episode.group,
        "index": episode.index,
        "prompt": episode.example.prompt,
        "references": list(episode.example.references),
        "turns": [_turn_record(turn) for turn in episode.turns],
        "reward_components": episode.reward_components,
        "score": episode.score,
        **({"error": episode.error} if episode.error else {}),
        "version": episode.version,
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    """A turn as a record, without its kept sets: they would add a bit for each action and token of the vocabulary."""
    record = asdict(replace(turn, kept=None))
    del record["kept"]
    return record


def sampled_tokens(episodes: Sequence[Episode]) -> int:
    """Tokens that the policy sampled in these episodes."""
    return sum(len(turn.action_ids) for episode in episodes for turn in episode.turns)


def peak_memory_gib() -> float:
    """Peak memory of this process in GiB (main memory, not a GPU's)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
