"""What the adapters of RL4LMs' classes share: making instances of a user's class, and looking like it to a recipe."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import OPTIONS as REWARD_OPTIONS
from lmgym.tasks.base import OPTIONS as TASK_OPTIONS

# What a recipe's section means by these names; a class's own argument of such a name has "own_" before it.
TAKEN = {"task": {*TASK_OPTIONS, "seed", "name"}, "reward": {*REWARD_OPTIONS, "part"}}


class Maker:
    """Makes instances of a user's class: one for each set of arguments, kept for as long as the process lives.

    Example: Maker("reward", "haiku_meter", HaikuMeter)({"conditional": True})
    """

    def __init__(self, kind: str, id: str, cls: type) -> None:
        self.kind, self.id, self.cls = kind, id, cls
        self.made: dict[str, Any] = {}

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        key = repr(sorted(arguments.items()))
        if key not in self.made:
            try:
                self.made[key] = self.cls(**arguments)
            except LmgymError:
                raise
            except Exception as error:
                given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
                raise LmgymError(
                    f"{self.kind} '{self.id}': {self.cls.__name__}({given}) raised {type(error).__name__}: {error}"
                ) from error
        return self.made[key]


def bases(cls: type) -> set[str]:
    """The names of a class and of all that it inherits from. By name, so that a class that still imports RL4LMs' own
    bases is recognised."""
    return {base.__name__ for base in cls.__mro__}


def need_class(kind: str, id: str, cls: Any, method: str) -> None:
    """Raise LmgymError unless `cls` is a class with this method."""
    if not isinstance(cls, type) or not callable(getattr(cls, method, None)):
        shown = "" if method == "__call__" else f".{method}"
        raise LmgymError(f"{kind} '{id}': RL4LMs' add() takes a class whose instances are called{shown}, not {cls!r}")


def theirs(own: Callable[..., Any], kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's arguments under the names that `own`, the class itself or its `prepare`, has for them."""
    names = {f"own_{name}": name for name in inspect.signature(own).parameters if name in TAKEN[kind]}
    return {names.get(name, name): value for name, value in arguments.items()}


def recipe_arguments(kind: str, id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an added class, as RL4LMs' files have them, under the names of a recipe.

    Example: a pool with a seed of its own
        >>> recipe_arguments("task", "shuffled", {"seed": 4, "largest": 9})
        {'own_seed': 4, 'largest': 9}
    """
    known = inspect.signature(registry.get(kind, id)).parameters
    return {f"own_{name}" if f"own_{name}" in known else name: value for name, value in arguments.items()}


def present(
    function: Callable[..., Any],
    cls: type,
    given: Sequence[str],
    own: Callable[..., Any],
    kind: str,
    also: Sequence[str] = (),
) -> None:
    """Let an adapter look like the class that it is for: name, documentation, and as its arguments first those that it
    is given, then `also` (None where they are left out), then those of `own`, the class itself or its `prepare`, with
    "own_" before those names that a recipe's section means something else by."""
    function.__name__, function.__qualname__, function.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    function.__doc__ = cls.__doc__
    function.__annotations__ = {}
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in given]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in also]
    everything = None
    for parameter in inspect.signature(own).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            everything = parameter.replace(annotation=kinds.empty)
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "split":
            name = f"own_{parameter.name}" if parameter.name in TAKEN[kind] else parameter.name
            parameters.append(parameter.replace(name=name, kind=kinds.KEYWORD_ONLY, annotation=kinds.empty))
    if everything is not None:
        parameters.append(everything)
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
