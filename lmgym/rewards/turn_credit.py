"""Rewards that pay turn by turn (option `each_turn`): what a judge of single steps, or a format that each message has
to keep, is for."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.rewards.base import Reward, call_reward
from lmgym.types import Episode


def rewards_by_turn(reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0) -> list[list[float]]:
    """For each episode what each of its turns earns, before the weight: the reward of the episode as it would be had it
    ended behind that turn. A turn whose action goes on in the next one (`Turn.unfinished`) earns nothing by itself.

    The reward of the episode is their sum. It costs a call of the reward for each turn. Raises as `evaluate` does.

    Example: `words`, of answers of two, one and three words
        >>> rewards_by_turn(build_rewards({"words": {"each_turn": True}})[0], [episode])
        [[2.0, 1.0, 3.0]]
    """
    judged = [turn_prefixes(episode) for episode in episodes]
    values = iter(call_reward(reward, [part for parts in judged for _, part in parts], timeout))
    found = []
    for episode, parts in zip(episodes, judged, strict=True):
        earned = [0.0] * len(episode.turns)
        for index, _ in parts:
            earned[index] = next(values)
        found.append(earned)
    return found


def turn_prefixes(episode: Episode) -> list[tuple[int, Episode]]:
    """The episode as it would be had it ended behind each of its actions, and the place of that action's last turn; the
    last one is the episode itself."""
    last = len(episode.turns) - 1
    return [
        (index, episode if index == last else replace(episode, turns=episode.turns[: index + 1]))
        for index, turn in enumerate(episode.turns)
        if index == last or not turn.unfinished
    ]
