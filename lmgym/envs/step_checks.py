"""Checks of what an environment returns; numpy values become Python values."""

import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import represent
from lmgym.core.validation import check_text
from lmgym.envs.base import Step

LONGEST_OBSERVATION = 1_000_000  # characters: tokenizing ten times as many took more than a minute
ROLES = ("system", "user", "assistant", "tool")
FLAGS = ("terminated", "truncated", "unfinished", "restart")  # of a step


def plain(value: Any) -> Any:
    """A numpy value as a Python value, an array as a list; any other value as it is.

    Example: plain(np.bool_(False)) -> False"""
    return value.tolist() if _is_numpys(value) else value


def plain_or_text(value: Any) -> Any:
    """As `plain`, for values that JSON does not know: what is no numpy value becomes a text.

    Example: json.dumps({"row": np.array([1, 2])}, default=plain_or_text) -> '{"row": [1, 2]}'"""
    return plain(value) if _is_numpys(value) else str(value)


def _is_numpys(value: Any) -> bool:
    return hasattr(value, "tolist") and not isinstance(value, type)


def check_demonstration(text: Any) -> str:
    """The text itself. Raises TypeError for a demonstration that is no text."""
    if not isinstance(text, str) or not text:
        raise TypeError(f"demonstrate() returned {represent(text)}; it must return a text")
    check_text(text, "what demonstrate() returned")
    return text


def _can_be_trained_on(value: Any) -> bool:
    size: Any = abs(value) if isinstance(value, numbers.Real) else None
    return size is not None and bool(size <= LARGEST_REWARD)  # False for nan too


def reward_number(reward: Any) -> float:
    """The reward as a number, also that of an array of one number. Raises ValueError for what is none."""
    try:
        return float(reward.item() if hasattr(reward, "item") else reward)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"the environment paid the reward {represent(reward)}; it must be one number") from None


def check_step(step: Any) -> Step:
    """The step itself, with Python's values in place of numpy's. Raises TypeError or ValueError, with one sentence, for
    a step that a rollout cannot use.

    Example: check_step(Step(terminated=np.bool_(True))).terminated -> True"""
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}; it must return a Step")
    if hasattr(step.reward, "shape"):
        step = replace(step, reward=reward_number(step.reward))
    if isinstance(step.reward, bool) or not _can_be_trained_on(step.reward):
        raise ValueError(
            f"step() returned the reward {represent(step.reward)}; it must be a finite number within {LARGEST_REWARD:g}"
        )
    if not all(_can_be_trained_on(value) for value in step.others.values()):
        raise ValueError(
            f"step() pays the others {represent(dict(step.others))}; they must be finite numbers within "
            f"{LARGEST_REWARD:g}"
        )
    step = _in_python(step)
    check_messages(step.messages)
    if step.continuation is not None:
        check_text(step.continuation, "the continuation")
        check_size(len(step.continuation))
    if step.over:
        return step
    # An episode that goes on has either messages or a continuation.
    if (step.continuation is None) == (not step.messages):
        raise ValueError(
            "step() returned neither messages nor a continuation for an episode that goes on"
            if step.continuation is None
            else "step() returned messages and a continuation; the policy either hands over or goes on"
        )
    return step


def _in_python(step: Step) -> Step:
    """The step with Python values only, as it is sent to other processes: JSON would write numpy's False as a text,
    and a text is true."""
    changed: dict[str, Any] = {name: bool(getattr(step, name)) for name in FLAGS}
    changed["player"] = None if step.player is None else _whole(step.player)
    if step.others:
        changed["others"] = {_whole(number): reward_number(reward) for number, reward in step.others.items()}
    if any(map(_is_numpys, step.info.values())):
        changed["info"] = {name: plain(note) for name, note in step.info.items()}
    changed = {name: value for name, value in changed.items() if value is not getattr(step, name)}
    return replace(step, **changed) if changed else step


def _whole(number: Any) -> int:
    """The number of a player."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"step() names player {represent(number)}; it must be a whole number") from None


def check_messages(messages: Any) -> None:
    """Raise TypeError or ValueError if these are no messages, or too long."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages are {represent(messages)}; they must be a list of {{role, content}}")
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            raise TypeError(f"a message is {represent(message)}; it must hold a role and a text as content")
        if message.get("role") not in ROLES:
            raise ValueError(f"a message has the role {represent(message.get('role'))}; valid: {', '.join(ROLES)}")
        check_text(message["content"], "a message")
    check_size(sum(len(message["content"]) for message in messages))


def check_size(characters: int) -> None:
    """Raise ValueError for more characters than an environment may write at once."""
    if characters > LONGEST_OBSERVATION:
        raise ValueError(
            f"the environment wrote {characters:,} characters at once; the limit is {LONGEST_OBSERVATION:,}, more than "
            "a model's context holds"
        )
