"""verifiers: `(prompt, completion, answer, state, info) -> number`, called once for each answer; or a Rubric."""

import inspect
from collections.abc import Mapping
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.processes.coroutines import results_of
from lmgym.rewards.foreign.signature import EpisodeReward, Foreign, prompt_of, written_of
from lmgym.types import Episode

VERIFIERS = ("prompt", "completion", "answer", "state", "info", "task")


def from_verifiers(function: Any, name: str = "") -> EpisodeReward:
    """Turn a reward function written for verifiers, or a Rubric of weighted functions, into an lmgym reward of
    episodes. A Rubric's value is the weighted sum of its functions.

    A function, or coroutine function, is called once for each answer, with the keywords that it names: `prompt` and
    `completion` (lists of messages, of several turns all behind the prompt), `answer` (`meta`'s, else the first
    reference, else ""), `info` (`meta`'s, else all of `meta`), `task` (`meta`'s, else ""), `state` (a dictionary of
    these, with example_id, is_completed and is_truncated), the other keys of `meta`, the recipe's arguments, and the
    objects of its Rubric (`parser` ...).

    Raises LmgymError for a function of whole groups, and for one that needs what only verifiers' rollouts have. An
    exception in the function ends the run; in verifiers it counts as 0. The attribute `check` of the result raises
    LmgymError for a parameter that no example has a key of `meta` for.

    Source: verifiers 0.1.14, Rubric.score_objects and Rubric._call_individual_reward_func. (Later versions have tasks
    with methods in place of functions.)

    Example:
        >>> async def correct(completion, answer):
        ...     return float(answer in completion[-1]["content"])
        >>> from_verifiers(correct)(episodes)
        [1.0, 0.0]
    """
    called = name or getattr(function, "__name__", "reward")
    rubric = is_rubric(function)
    functions, weights = (function.funcs, function.weights) if rubric else ([function], [1.0])
    objects = dict(getattr(function, "class_objects", {})) if rubric else {}
    if not functions or len(functions) != len(weights):
        raise LmgymError(f"reward '{called}' is a Rubric of {len(functions)} functions and {len(weights)} weights")
    foreign = [Foreign(one, called, "verifiers", (*VERIFIERS, *objects)) for one in functions]
    needed = dict.fromkeys(key for one in foreign for key in one.needed())

    def reward(episodes: list[Episode], **arguments: Any) -> list[float]:
        states = [{**dict.fromkeys(needed), **_state(episode, objects), **arguments} for episode in episodes]
        columns = [results_of([one.function(**one.chosen(state)) for state in states]) for one in foreign]
        if not rubric:
            return columns[0]
        rows = zip(*columns, strict=True)
        return [sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in rows]

    return foreign[0].finished(reward, needed)  # type: ignore[no-any-return]


def _state(episode: Episode, objects: Mapping[str, Any]) -> dict[str, Any]:
    """All keyword arguments that verifiers would pass for one answer."""
    example = episode.example
    meta, prompt = dict(example.meta), prompt_of(example)
    own = {
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "completion": written_of(episode),
        "answer": meta.get("answer", example.references[0] if example.references else ""),
        "info": meta.get("info", meta),
        "task": meta.get("task", ""),
    }
    state = {**own, "example_id": example.id, "is_completed": True, "is_truncated": episode.truncated}
    return {**meta, **own, "state": state, **objects}


def is_rubric(thing: Any) -> bool:
    """True for verifiers' Rubric: functions and their weights."""
    lists = [getattr(thing, attribute, None) for attribute in ("funcs", "weights")]
    return not inspect.isroutine(thing) and all(isinstance(one, list) for one in lists)
