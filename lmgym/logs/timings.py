"""Seconds of each answer, by a clock: timings.jsonl in a run folder (docs/run_folder.md). Imports no torch.

They are apart from traces/, since two equal runs have equal traces, and never equal seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.types import Episode

PARTS = ("sampling", "environment")
"""Of a turn: the engine's call that it was part of; its environment's answer to it, tools included."""


def timing_record(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What timings.jsonl says of a step's answers, in the order of their index, with four digits.

    "sampling", "environment" and each of "rewards" have a number for each answer, or one number, where that holds for
    all; an answer of several turns has a list of theirs, and one of which nothing is known has None. A part that no
    answer has is absent.

    Example: timing_record(episodes) -> {"sampling": 0.42, "environment": [[0.1, 2.3], 0.2], "rewards": {"judge": 1.9}}
    """
    episodes = sorted(episodes, key=lambda episode: episode.index)
    columns = {part: [_turns(one, part) for one in episodes] for part in PARTS}
    record: dict[str, Any] = {part: _shortest(column) for part, column in columns.items() if _known(column)}
    names = dict.fromkeys(name for one in episodes for name in one.reward_seconds)
    rewards = {name: _shortest([_rounded(one.reward_seconds.get(name)) for one in episodes]) for name in names}
    return record | ({"rewards": rewards} if rewards else {})


def timing_columns(record: Mapping[str, Any], count: int) -> dict[str, list[float | None]]:
    """The sums over the turns of `count` answers by part: "seconds/sampling", "seconds/environment", and over all
    rewards "seconds/rewards". A part that the record lacks is absent.

    Example:
        >>> timing_columns({"sampling": 0.5, "environment": [[0.5, 0.25], None]}, count=2)
        {'seconds/sampling': [0.5, 0.5], 'seconds/environment': [0.75, None]}
    """
    columns = {
        f"seconds/{part}": [_sum(timing_of(record.get(part), place)) for place in range(count)] for part in PARTS
    }
    rewards = list(record.get("rewards", {}).values())
    columns["seconds/rewards"] = [_sum([timing_of(one, place) for one in rewards]) for place in range(count)]
    return {name: column for name, column in columns.items() if _known(column)}


def timing_of(column: Any, place: int) -> Any:
    """One answer's part of a record's column: a number, a list of numbers, or None."""
    if not isinstance(column, list):
        return column
    return column[place] if place < len(column) else None


def _turns(episode: Episode, part: str) -> float | list[float | None] | None:
    seconds = [_rounded(turn.seconds.get(part)) for turn in episode.turns]
    if not _known(seconds):
        return None
    return seconds[0] if len(seconds) == 1 else seconds


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")


def _known(column: Sequence[Any]) -> bool:
    return any(value is not None for value in column)


def _shortest(column: list[Any]) -> Any:
    same = not isinstance(column[0], list) and all(value == column[0] for value in column)
    return column[0] if same else column


def _sum(seconds: Any) -> float | None:
    known = [one for one in (seconds if isinstance(seconds, list) else [seconds]) if one is not None]
    return float(f"{sum(known):.4g}") if known else None
