"""Answers that a reward fails for: they are found, and the other answers keep their values."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmgym.core.errors import LmgymError
from lmgym.processes.pool import Failure
from lmgym.types import Episode

Value = TypeVar("Value")
LEAST_SECONDS = 1.0  # of a part of a call that was too slow


class RewardFailed(LmgymError):
    """A call of a reward has no values: the function raised, took too long, or ended its process."""


def too_many(name: str, messages: Sequence[str], most: int) -> str:
    """The sentence about a reward that has failed for more answers than it may: the first message, and the numbers."""
    first = messages[0] if f"'{name}'" in messages[0] else f"reward '{name}': {messages[0]}"
    return f"{first}; it failed for {len(messages)} answers, and rewards_failed allows {most}" if most else first


def values_or_failures(
    name: str,
    call: Callable[[Sequence[Episode], float | None], list[Value | Failure]],
    units: Sequence[Sequence[Episode]],
    timeout: float | None,
    most: int,
) -> list[Value | Failure]:
    """What `call(episodes, timeout)` returns for each episode of all units, and Failures where it fails for a unit
    alone: a single episode, or the answers to a prompt that a reward compares.

    A call that fails is repeated for each half of its units, down to single ones. A part has the same part of the
    `timeout`, LEAST_SECONDS at least, so that one answer without end costs about a second `timeout`. Raises LmgymError
    if more than `most` episodes fail; with 0 at once, without a search for the one that is to blame.

    Example: values_or_failures("judge", lambda some, seconds: call_reward(judge, some, seconds), [[one], [other]],
    60.0, 1) -> [1.0, Failure("error", "reward 'judge' raised ...")]"""
    failures = list[Failure]()

    def counted(found: Sequence[Failure]) -> None:
        failures.extend(found)
        if len(failures) > most:
            raise LmgymError(too_many(name, [failure.message for failure in failures], most))

    def judge(part: Sequence[Sequence[Episode]]) -> list[Value | Failure]:
        seconds, episodes = timeout, [one for unit in part for one in unit]
        if timeout is not None and len(part) < len(units):
            seconds = min(timeout, max(timeout * len(part) / len(units), LEAST_SECONDS))
        try:
            values = call(episodes, seconds)
        except RewardFailed as error:
            if not most:
                raise
            if len(part) > 1:
                middle = len(part) // 2
                return [value for half in (part[:middle], part[middle:]) for value in judge(half)]
            values = [Failure("error", str(error)) for _ in episodes]
        counted([value for value in values if isinstance(value, Failure)])
        return values

    return judge(units)
