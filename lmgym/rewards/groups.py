"""Rewards that see all answers to a prompt at once: functions marked with `@of_groups`."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.processes.coroutines import result_of
from lmgym.rewards.base import Judgement, Reward, episodes
from lmgym.types import Episode


def of_groups(function: Callable[..., Any]) -> Callable[..., list[Judgement]]:
    """Decorator: this reward compares the answers to a prompt. It takes `(texts, examples, **arguments)` as others do,
    but `texts[n]` is the list of all answers to the prompt of `examples[n]`, and it returns such lists of numbers. In
    training a group has `algorithm.group_size` answers, in an evaluation `evaluation.samples`.

    Example:
        >>> @register("reward", "shortest")
        ... @of_groups
        ... def shortest(texts, examples):
        ...     return [[float(len(text) == min(map(len, group))) for text in group] for group in texts]
    """

    @wraps(function)
    def reward(shown: Sequence[Episode], **arguments: Any) -> list[Judgement]:
        groups = by_group(shown)
        texts, examples = [[one.text for one in group] for group in groups], [group[0].example for group in groups]
        found = result_of(function(texts, examples, **arguments))
        sizes, wanted = [len(own) if hasattr(own, "__len__") else None for own in found], [*map(len, groups)]
        if sizes != wanted:
            raise LmgymError(
                f"reward '{function.__name__}' is of groups, and returned lists of {sizes} numbers for groups of "
                f"{wanted} answers"
            )
        judged = zip(chain.from_iterable(groups), chain.from_iterable(found), strict=True)
        values = {id(one): value for one, value in judged}
        return [values[id(one)] for one in shown]

    own = list(inspect.signature(function).parameters.values())[2:]
    first = inspect.Parameter("shown", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    reward.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
    reward.compares = True  # type: ignore[attr-defined]
    return episodes(reward)


def by_group(shown: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes by the prompt that they answer."""
    groups: dict[int, list[Episode]] = {}
    for one in shown:
        groups.setdefault(one.group, []).append(one)
    return list(groups.values())


def compares(reward: Reward) -> bool:
    """Whether the reward's function is marked with `@of_groups`."""
    return bool(getattr(reward.function, "compares", False))


def check_comparisons(rewards: Sequence[Reward], group_size: int, alone: bool) -> None:
    """Raise LmgymError for a reward of groups where an answer has no other to be compared with: a single answer to a
    prompt, or one that is scored `alone`, as a baseline."""
    for reward in (reward for reward in rewards if reward.weight and compares(reward)):
        if alone or group_size < 2:
            why = "the algorithm scores an answer alone, as a baseline" if alone else "algorithm.group_size is 1"
            raise LmgymError(
                f"reward '{reward.name}' compares the answers to a prompt with each other, and {why}; take an "
                "algorithm of groups, such as grpo or rloo, with group_size 2 or more"
            )
