"""OpenRLHF: `reward_func(queries, prompts, labels)`, called once for all answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.processes.coroutines import result_of
from lmgym.rewards.foreign.signature import EpisodeReward, Foreign, note
from lmgym.types import Episode

OPENRLHF = ("queries", "prompts", "labels")


def from_openrlhf(function: Callable[..., Any], name: str = "") -> EpisodeReward:
    """Turn a reward function written for OpenRLHF, `(queries, prompts, labels)`, into an lmgym reward of episodes.

    It is called once for all answers. A query is prompt and answer as the model has read and written them, control
    tokens included, a prompt is its beginning. A label is the column `label`, else the first reference, else "". It
    returns a list or a tensor, or a dictionary: its `rewards` count, `scores` and each of `extra_logs` are recorded as
    NAME/KEY.

    Source: OpenRLHF, SingleTurnAgentExecutor (utils/agent.py).

    Example: from_openrlhf(lambda queries, prompts, labels: [float(y in q) for q, y in zip(queries, labels)])(episodes)
    -> [1.0, 0.0]"""
    foreign = Foreign(function, name or getattr(function, "__name__", "reward"), "OpenRLHF", OPENRLHF)
    needed = foreign.needed()

    def reward(episodes: list[Episode], **arguments: Any) -> list[float]:
        columns = {key: [episode.example.meta.get(key) for episode in episodes] for key in needed}
        found = result_of(function(**foreign.chosen({**columns, **arguments, **lists_of(episodes)})))
        return rewards_in(found, episodes, foreign.called)

    finished = foreign.finished(reward, needed)
    finished.reads_sequence = "tokens"
    return finished  # type: ignore[no-any-return]


def lists_of(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """The three lists of OpenRLHF, of episodes as `views.as_sequence` shows them."""
    examples = [episode.example for episode in episodes]
    return {
        "queries": ["".join(message["content"] for message in episode.messages) for episode in episodes],
        "prompts": [episode.messages[0]["content"] for episode in episodes],
        "labels": [one.meta.get("label", one.references[0] if one.references else "") for one in examples],
    }


def rewards_in(found: Any, episodes: Sequence[Episode], called: str) -> Any:
    """The numbers of a result, its other entries noted: a list of one for each answer, or one number for all. Raises
    LmgymError for `extra_logs` without names."""
    if not isinstance(found, Mapping):
        return found
    logs = found.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise LmgymError(f"reward '{called}': 'extra_logs' must be names with values, got {represent(logs)}")
    for key, values in {**({"scores": found["scores"]} if "scores" in found else {}), **logs}.items():
        each = getattr(values, "ndim", 1) and hasattr(values, "__len__") and len(values) == len(episodes)
        for episode, value in zip(episodes, values if each else [values] * len(episodes), strict=True):
            note(episode, f"{called}/{key}", value)
    return found.get("rewards")
