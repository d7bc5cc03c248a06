"""The other side of workers.py: a fresh process that holds environments and answers for them. JSON in, JSON out."""

import json
import mmap
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Env, Step
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.types import Example

COUNTER = 8  # bytes


def serve(given: Mapping[str, Any]) -> None:
    """Read a line of commands, answer them with a line each, until the input ends. How many commands have been begun
    stands in the memory that `given["counter"]` is a file descriptor of: answers go out together, so that the owner is
    not woken for each, and whatever hangs or crashes is still known by its number."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are meant for the owner, whose end is ours
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what an environment prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    envs: InProcess | None = None
    counter = memoryview(mmap.mmap(given["counter"], COUNTER)).cast("Q")
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as out:
        while line := lines.readline():
            for command in json.loads(line):
                counter[0] += 1
                try:
                    envs = envs or InProcess(_maker(given))
                    answer = plain(_answer(envs, command))
                except LmgymError as error:
                    answer = {"refused": str(error)}
                out.write(json.dumps(answer, default=str).encode() + b"\n")
            out.flush()


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
    """What `plain` has written."""
    ((kind, value),) = answer.items()
    if kind == "Opening":
        return Opening(**{**value, "stop": tuple(value["stop"]), "learners": tuple(value["learners"])})
    if kind == "Step":  # JSON has texts as keys
        value = {**value, "others": {int(player): reward for player, reward in value["others"].items()}}
    return {"Step": lambda: Step(**value), "EnvFailure": lambda: EnvFailure(**value)}.get(kind, lambda: value)()


def _maker(given: Mapping[str, Any]) -> Callable[[], Env]:
    for plugin in given["plugins"]:
        registry.load_plugin(plugin)
    return partial(registry.get("env", given["name"]), **given["arguments"])


def _answer(envs: InProcess, command: Mapping[str, Any]) -> Any:
    place = command["place"]
    if command["do"] == "begin":
        example = Example(**{**command["example"], "references": tuple(command["example"]["references"])})
        return envs.begin([(place, example, command["seed"])])[0]
    if command["do"] == "step":
        return envs.step([(place, command["text"], command["stop"])])[0]
    if command["do"] == "demonstrate":
        return envs.demonstrate([place])[0]
    envs.end([place])
    return None
