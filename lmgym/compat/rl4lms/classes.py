"""Shared by the adapters of RL4LMs' classes: make instances of a user's class, and give an adapter its signature."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError, describe
from lmgym.rewards.building import OPTIONS as REWARD_OPTIONS
from lmgym.tasks.base import OPTIONS as TASK_OPTIONS

# Keys that a recipe's section uses itself; a class's argument of such a name is called "own_NAME" in a recipe.
RESERVED = {"task": {*TASK_OPTIONS, "seed", "name"}, "reward": {*REWARD_OPTIONS, "part"}}


class Maker:
    """Makes instances of a user's class, one for each set of a recipe's arguments, kept until the process ends.

    Example: Maker("reward", "haiku_meter", HaikuMeter)({"conditional": True})"""

    def __init__(self, kind: str, id: str, cls: type) -> None:
        self.kind, self.id, self.cls = kind, id, cls
        self.made: dict[str, Any] = {}

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        arguments = class_arguments(self.cls, "reward", arguments)
        key = repr(sorted(arguments.items()))
        if key not in self.made:
            try:
                self.made[key] = self.cls(**arguments)
            except LmgymError:
                raise
            except Exception as error:
                given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
                raise LmgymError(
                    f"{self.kind} '{self.id}': {self.cls.__name__}({given}) raised {describe(error)}"
                ) from error
        return self.made[key]


def base_names(cls: type) -> set[str]:
    """The names of a class and of its bases; so a class that still imports RL4LMs' own bases is recognised."""
    return {base.__name__ for base in cls.__mro__}


def check_class(kind: str, id: str, cls: Any, method: str) -> None:
    """Raise LmgymError unless `cls` is a class with this method."""
    if not isinstance(cls, type) or not callable(getattr(cls, method, None)):
        shown = "" if method == "__call__" else f".{method}"
        raise LmgymError(f"{kind} '{id}': RL4LMs' add() takes a class whose instances are called{shown}, not {cls!r}")


def class_arguments(function: Callable[..., Any], kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's arguments under the names that `function`, the class itself or its `prepare`, has for them."""
    names = {f"own_{name}": name for name in inspect.signature(function).parameters if name in RESERVED[kind]}
    return {names.get(name, name): value for name, value in arguments.items()}


def recipe_arguments(kind: str, id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an added class, as RL4LMs' files have them, under the names of a recipe.

    Example: recipe_arguments("task", "pool_with_a_seed", {"seed": 4, "largest": 9}) -> {"own_seed": 4, "largest": 9}"""
    known = inspect.signature(registry.get(kind, id)).parameters
    return {f"own_{name}" if f"own_{name}" in known else name: value for name, value in arguments.items()}


def imitate(
    adapter: Callable[..., Any],
    cls: type,
    given: Sequence[str],
    source: Callable[..., Any],
    kind: str,
    also: Sequence[str] = (),
) -> None:
    """Give an adapter the name, the docstring and the arguments of the user's class. Its arguments are `given`
    (positional), `also` (default None), then those of `source`, which is the class itself or its `prepare`; a reserved
    name gets "own_" before it."""
    adapter.__name__, adapter.__qualname__, adapter.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    adapter.__doc__ = cls.__doc__
    adapter.__annotations__ = {}
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in given]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in also]
    everything = None
    for parameter in inspect.signature(source).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            everything = parameter.replace(annotation=kinds.empty)
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "split":
            name = f"own_{parameter.name}" if parameter.name in RESERVED[kind] else parameter.name
            parameters.append(parameter.replace(name=name, kind=kinds.KEYWORD_ONLY, annotation=kinds.empty))
    if everything is not None:
        parameters.append(everything)
    adapter.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
