"""The code that runs in the processes of env_processes.py: environments that obey commands. JSON in, JSON out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Branch, Step
from lmgym.envs.step_checks import plain_or_text
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.pictures.store import keep_pictures_in
from lmgym.types import Example, recipe_spans, with_recipe_spans

_envs = InProcess(lambda: registry.get("env", "")())  # `prepare` sets the real one


def run_command(command: Mapping[str, Any]) -> tuple[str, float]:
    """The answer of an environment to a command, as JSON text (for an LmgymError {"refused": its sentence}), and the
    seconds that it took."""
    try:
        answer = json.dumps(to_json(_obey(command)), default=plain_or_text)
    except LmgymError as error:
        answer = json.dumps({"refused": str(error)})
    return answer, _envs.spent.get(command["index"], 0.0)


def prepare(name: str, arguments: Mapping[str, Any], plugins: Sequence[str], pictures: str) -> None:
    """Import the environment `name`, before the process that holds the environments is forked. Its pictures go to the
    folder `pictures`."""
    keep_pictures_in(Path(pictures))
    for plugin in plugins:
        registry.load_plugin(plugin)
    _envs.make_env = partial(registry.get("env", name), **arguments)


run_command.prepare = prepare  # type: ignore[attr-defined]


def to_json(answer: Opening | Step | EnvFailure | str | None) -> dict[str, Any]:
    """An answer as values that JSON can hold; `from_json` reads them.

    Example: to_json(EnvFailure("ValueError: no such move")) -> {"EnvFailure": {"message": "ValueError: no such move"}}
    """
    if isinstance(answer, Step):
        spans = recipe_spans(answer.messages)
        return {"Step": {**asdict(answer), "reward": float(answer.reward)}, "recipe_spans": spans}
    if isinstance(answer, Opening):
        return {"Opening": asdict(answer), "recipe_spans": recipe_spans(answer.prompt)}
    if isinstance(answer, EnvFailure):
        return {"EnvFailure": asdict(answer)}
    return {"text": answer}


def from_json(answer: Mapping[str, Any]) -> Any:
    """The answer that `to_json` has written. Raises LmgymError for a refusal."""
    kind, value = next(iter(answer.items()))
    if kind == "refused":
        raise LmgymError(value)
    if kind == "Opening":
        prompt = with_recipe_spans(value["prompt"], answer["recipe_spans"])
        tuples = {name: tuple(value[name]) for name in ("stop", "learners", "sampling_seed")}
        return Opening(**{**value, **tuples, "prompt": prompt})
    if kind == "Step":  # keys of JSON are texts
        others = {int(player): reward for player, reward in value["others"].items()}
        branch = value["branch"] and Branch(
            **{**value["branch"], **{name: tuple(value["branch"][name]) for name in ("stop", "sampling_seed")}}
        )
        value = {
            **value,
            "others": others,
            "branch": branch,
            "messages": with_recipe_spans(value["messages"], answer["recipe_spans"]),
        }
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
