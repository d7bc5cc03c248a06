"""Rewards per turn (option `each_turn`): for a judge of single steps, or a format that each message must keep."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.rewards.base import Reward, call_reward
from lmgym.types import Episode


def rewards_by_turn(reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0) -> list[list[float]]:
    """For each episode the rewards of its turns, not yet weighted. A turn's reward is that of the episode as if it
    ended after this turn. A turn whose action continues in the next one (`Turn.unfinished`) gets 0.

    The reward of the episode is their sum. It costs one call of the reward per turn. Raises as `call_reward` does."""
    prefixes = [turn_prefixes(episode) for episode in episodes]
    values = iter(call_reward(reward, [prefix for own in prefixes for _, prefix in own], timeout))
    results = []
    for episode, own in zip(episodes, prefixes, strict=True):
        earned = [0.0] * len(episode.turns)
        for index, _ in own:
            earned[index] = next(values)
        results.append(earned)
    return results


def turn_prefixes(episode: Episode) -> list[tuple[int, Episode]]:
    """For each action: the index of its last turn, and the episode as if it ended there. The last item is the episode
    itself."""
    last = len(episode.turns) - 1
    return [
        (index, episode if index == last else replace(episode, turns=episode.turns[: index + 1]))
        for index, turn in enumerate(episode.turns)
        if index == last or not turn.unfinished
    ]
