"""What the processes of env_processes.py run: environments that answer commands. JSON in, JSON out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.types import Example

_envs = InProcess(lambda: registry.get("env", "")())  # `prepare` says what to build


def answer(command: Mapping[str, Any]) -> str:
    """What an environment answers to a command, as JSON: what `plain` makes of it, or {"refused": a sentence}."""
    try:
        return json.dumps(plain(_obey(command)), default=str)
    except LmgymError as error:
        return json.dumps({"refused": str(error)})


def prepare(name: str, arguments: Mapping[str, Any], plugins: Sequence[str]) -> None:
    """Import the environment `name`, before the process that holds environments is forked."""
    for plugin in plugins:
        registry.load_plugin(plugin)
    _envs.make_env = partial(registry.get("env", name), **arguments)


answer.prepare = prepare  # type: ignore[attr-defined]


def plain(answer: Opening | Step | EnvFailure | str | None) -> dict[str, Any]:
    """An answer as JSON can hold it; `read` is the way back.

    Example: plain(EnvFailure("ValueError: no such move")) -> {"EnvFailure": {"message": "ValueError: no such move"}}
    """
    if isinstance(answer, Step):
        return {"Step": {**asdict(answer), "reward": float(answer.reward)}}
    if isinstance(answer, Opening | EnvFailure):
        return {type(answer).__name__: asdict(answer)}
    return {"text": answer}


def read(answer: Mapping[str, Any]) -> Any:
    """What `plain` has written. Raises LmgymError for a refusal."""
    ((kind, value),) = answer.items()
    if kind == "refused":
        raise LmgymError(value)
    if kind == "Opening":
        return Opening(**{**value, "stop": tuple(value["stop"]), "learners": tuple(value["learners"])})
    if kind == "Step":  # JSON has texts as keys
        value = {**value, "others": {int(player): reward for player, reward in value["others"].items()}}
    return {"Step": lambda: Step(**value), "EnvFailure": lambda: EnvFailure(**value)}.get(kind, lambda: value)()


def _obey(command: Mapping[str, Any]) -> Any:
    index = command["index"]
    if command["do"] == "begin":
        return _envs.begin([(index, Example.from_json(command["example"]), command["seed"])])[0]
    if command["do"] == "step":
        return _envs.step([(index, command["text"], command["stop"])])[0]
    if command["do"] == "demonstrate":
        return _envs.demonstrate([index])[0]
    _envs.end([index])
    return None
