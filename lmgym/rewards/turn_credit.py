"""Rewards per turn (option `each_turn`): for a judge of single steps, or a format that each message must keep."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmgym.rewards.base import Reward, call_reward
from lmgym.types import Episode


def rewards_by_turn(
    reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0, tokenizer: Any = None
) -> list[list[float]]:
    """For each episode the rewards of its turns, not yet weighted. A turn's reward is that of the episode as if it
    ended after this turn. A turn whose action continues in the next one (`Turn.unfinished`) gets 0.

    The reward of the episode is their sum. It costs one call of the reward per turn. Raises as `call_reward` does."""
    # Score the episodes as if they ended with each action, in one call.
    ends = [[n for n, turn in enumerate(e.turns) if turn is e.turns[-1] or not turn.unfinished] for e in episodes]
    prefixes = [
        replace(episode, turns=episode.turns[: end + 1])
        for episode, own in zip(episodes, ends, strict=True)
        for end in own
    ]
    values = iter(call_reward(reward, prefixes, timeout, tokenizer))
    return [
        [next(values) if index in own else 0.0 for index in range(len(episode.turns))]
        for episode, own in zip(episodes, ends, strict=True)
    ]
