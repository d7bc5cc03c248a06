"""Paying a reward: by answer, by turn or by token; what it cannot judge earns nothing."""

import math
from collections.abc import Sequence
from typing import Any

from lmgym.processes.pool import Failure
from lmgym.rewards.base import Reward, call_reward
from lmgym.rewards.failures import values_or_failures
from lmgym.rewards.groups import by_group, compares
from lmgym.rewards.token_credit import rewards_by_token, rewards_by_turn
from lmgym.types import Episode


def pay_reward(
    reward: Reward, played: Sequence[Episode], timeout: float | None, tokenizer: Any, most_failures: int
) -> None:
    """Call a reward, and add what it says to the turns' rewards and to `reward_components`: None for an answer that it
    cannot judge. One that it fails for gets the reason, in `reward_errors`. Raises LmgymError if it fails for more than
    `most_failures`, and for a mistake in the recipe."""

    def ask(some: Sequence[Episode], seconds: float | None) -> list[Any]:
        if reward.by_token:
            return rewards_by_token(reward, some, tokenizer, seconds)
        if reward.each_turn:
            return rewards_by_turn(reward, some, seconds, tokenizer)
        return call_reward(reward, some, seconds, tokenizer)

    units = by_group(played) if compares(reward) else [[episode] for episode in played]
    values = values_or_failures(reward.name, ask, units, timeout, most_failures)
    for episode, value in zip((one for unit in units for one in unit), values, strict=True):
        if isinstance(value, Failure):
            episode.reward_errors[reward.name] = value.message
            value = None
        episode.reward_components[reward.name] = None if value is None else _paid(reward, episode, value)


def _paid(reward: Reward, episode: Episode, value: Any) -> float:
    """Pay an answer what `pay_reward` has found; returns what it comes to, before the weight."""
    last, weight = episode.turns[-1], reward.weight
    if reward.by_token:  # the last turn, and each of its tokens a part of that
        whole, tokens = value
        before = last.token_rewards or [0.0] * len(last.action_ids)
        last.reward += weight * whole
        last.token_rewards = [old + weight * new for old, new in zip(before, tokens, strict=True)]
        return float(whole)
    if reward.each_turn:
        for turn, own in zip(episode.turns, value, strict=True):
            turn.reward += weight * own
        return math.fsum(value)
    last.reward += weight * value
    return float(value)


def is_judged(episode: Episode, rewards: Sequence[Reward]) -> bool:
    """False if rewards count (a weight other than 0) and are for the episode's example, and none of them could judge
    it. So in TRL 1.16, but that there a weight of 0 counts too."""
    asked = [reward.name for reward in rewards if reward.weight and reward.applies(episode.example)]
    return not asked or any(episode.reward_components[name] is not None for name in asked)
