"""Rewards that run in a worker process, where nothing that they do can outlast their limit of time.

A reward goes there if a fresh process can import it by its name, and if it gets nothing but plain Python values. The
whole call goes to one worker (reward_worker.py), so the numbers are those that the function returns here. The others
stay in the training process, where an alarm stops only what lets itself be stopped (`unlimited_reason` says why)."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lmgym.core.errors import LmgymError, warn
from lmgym.core.importable import importable_name, imports_models
from lmgym.processes.pool import Failure, ProcessPool, shared
from lmgym.processes.supervisor import STARTUP_SECONDS
from lmgym.rewards.failures import RewardFailed
from lmgym.rewards.foreign.signature import note
from lmgym.types import Episode, Example, Turn

WORKER = "lmgym.rewards.reward_worker:run"
AFTER_THE_ALARM = 1.0  # seconds between the worker's own alarm, which knows the line, and the end of the process


class NeedsTorch(BaseException):
    """Raised by `import torch` in a worker. It is no Exception, so that no `try: import torch` changes what a reward
    does there."""


_warned: set[str] = set()  # names of rewards
_entering, _inside = threading.Lock(), list[None]()  # an item for each body of `fresh_worker`


@dataclass(frozen=True)
class Pooled:
    """A reward function as a worker finds it: "module:name" or "/path/plugin.py:name", and the reward's arguments.

    Example: Pooled("lmgym.rewards.text.form:regex", {"pattern": "[0-9]"})"""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    style: str = "lmgym"
    takes_episodes: bool = False
    factory: bool = False  # the target makes the function, of the arguments


def unlimited_reason(function: Callable[..., Any], arguments: Mapping[str, Any], written: str = "") -> str:
    """Why a reward has to stay in the training process; empty if it can go to a worker. `written` is the recipe's name
    of it, as in `importable_name`."""
    if getattr(function, "pays_tokens", False):
        return "it takes the policy's tokenizer"
    learned = str(getattr(function, "__module__", "")).startswith("lmgym.rewards.learned.")
    if learned or imports_models(function):
        return "it runs a model"
    if importable_name(function, written) is None:
        return "another process cannot import it by name"
    try:
        packed(dict(arguments))
    except TypeError as error:
        return f"its arguments hold {error}"
    return ""


@contextmanager
def fresh_worker() -> Iterator[None]:
    """In the body rewards find nothing in their worker that was left there before, so that two runs of one process are
    as those of two. Bodies side by side, in threads, share the worker of the first of them."""
    with _entering:
        if not _inside:
            shared(WORKER, 1).renew()
        _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()


def start_early() -> None:
    """Start the worker without waiting for it, so that it imports while the first answers are sampled."""
    shared(WORKER, 1).start_early()


def pooled_values(
    name: str, pooled: Pooled, episodes: Sequence[Episode], timeout: float
) -> list[float | Failure | None] | None:
    """The reward's values, from a worker; None if it has to be computed in this process after all, with a warning: an
    example cannot be sent, or the function imports torch.

    Raises RewardFailed if the reward raises, takes longer than `timeout` seconds by the clock, or ends its process, and
    LmgymError if it returns anything but a judgement per episode."""
    table, numbers = _distinct([episode.example for episode in episodes])
    try:
        examples = [[replace(example, meta={}).to_json(), packed(dict(example.meta))] for example in table]
        shown = [_episode_json(episode) if pooled.takes_episodes else episode.text for episode in episodes]
    except TypeError as error:
        _stays(name, f"an example or an episode holds {error}, which cannot be sent to another process")
        return None
    item = {
        **vars(pooled),
        "arguments": packed(dict(pooled.arguments)),
        "name": name,
        "timeout": timeout,
        "examples": examples,
        "rows": list(zip(numbers, shown, strict=True)),
    }
    pool = shared(WORKER, 1)
    # Importing is not part of the call. A worker imports a function once.
    for limit, asked in ((STARTUP_SECONDS, {**item, "examples": [], "rows": []}), (timeout, item)):
        [answer] = pool.map([asked], limit + AFTER_THE_ALARM, by_clock=True)
        if isinstance(answer, Failure):
            raise RewardFailed(_failed(name, answer, asked, pool))
        if "failed" in answer:
            raise RewardFailed(answer["failed"])
        if "refused" in answer:
            raise LmgymError(answer["refused"])
        if "stays" in answer:
            _stays(name, answer["stays"])
            return None
    for episode, notes in zip(episodes, answer["notes"], strict=True):
        for key, value in notes.items():
            note(episode, key, value)
    return [Failure(**value) if isinstance(value, dict) else value for value in answer["values"]]


def packed(value: Any) -> Any:
    """A value of plain Python as JSON that keeps its types: containers become lists that begin with their kind. Raises
    TypeError, with the name of its type, for anything else.

    Example: packed({"cells": (1, 2.5), 3: None}) -> ['dict', ['cells', ['tuple', 1, 2.5]], [3, None]]"""
    kind = type(value)
    if kind in (list, tuple):  # most of what is sent are lists of ids and log-probabilities
        return [kind.__name__, *(item if type(item) in (int, float, str) else packed(item) for item in value)]
    if kind is dict:
        return ["dict", *([packed(key), packed(item)] for key, item in value.items())]
    if value is None or isinstance(value, str | int | float):  # np.float64 is a float
        return value
    raise TypeError(f"a value of type {kind.__name__}")


def unpacked(tree: Any) -> Any:
    """The value that `packed` has written."""
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "dict":
        return {unpacked(key): unpacked(item) for key, item in items}
    values = [unpacked(item) for item in items]
    return tuple(values) if kind == "tuple" else values


def episode_from_json(sent: list[Any], example: Example) -> Episode:
    """The episode that `pooled_values` has sent to a worker."""
    tree = unpacked(sent)
    return Episode(example, **{**tree, "turns": [Turn.from_json(turn) for turn in tree["turns"]]})


def _episode_json(episode: Episode) -> Any:
    tree = {key: value for key, value in vars(episode).items() if key not in ("example", "reward_seconds")}
    return packed({**tree, "turns": [turn.to_json() for turn in episode.turns]})


def _failed(name: str, failure: Failure, item: Mapping[str, Any], pool: ProcessPool) -> str:
    """The sentence about a worker that has ended or was ended."""
    count = len(item["rows"])
    if not count:
        return f"reward '{name}': a process that imports it failed: {failure.message}"
    if failure.kind == "time":
        return f"reward '{name}' did not return within {item['timeout']:g} s for {count} episodes, and was killed"
    if failure.kind == "error":
        return f"reward '{name}' raised {failure.message}"
    index = _culprit(item, pool)
    if index is None:
        return f"reward '{name}': {failure.message} for {count} episodes"
    example = item["examples"][item["rows"][index][0]][0]["id"]
    return f"reward '{name}': {failure.message} for example '{example}' (index {index} of {count})"


def _culprit(item: Mapping[str, Any], pool: ProcessPool) -> int | None:
    """The index of the first answer that alone ends the worker, too; None if none does within the limit of a call."""
    until = time.monotonic() + item["timeout"]
    for index, row in enumerate(item["rows"]):
        if (left := until - time.monotonic()) <= 0:
            break
        [answer] = pool.map([{**item, "rows": [row]}], left, by_clock=True)
        if isinstance(answer, Failure):
            return index if answer.kind == "crash" else None
    return None


def _stays(name: str, reason: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warn(
        f"reward '{name}' runs in the training process, where its limit of time (reward_timeout) cannot be enforced: "
        f"{reason}",
        stacklevel=4,
    )


def _distinct(examples: Sequence[Example]) -> tuple[list[Example], list[int]]:
    """The examples without repetition, and the place of each in that list. The answers of a group share one."""
    places: dict[int, int] = {}
    numbers = [places.setdefault(id(example), len(places)) for example in examples]
    table = dict(zip(numbers, examples, strict=True))
    return [table[number] for number in range(len(table))], numbers
