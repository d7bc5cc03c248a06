"""Sections of a recipe: a plain tree to dataclasses, strictly, and back; config.py says which ones there are."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lmgym.algorithms.base import Algorithm
from lmgym.config.yaml import NAMED
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards import base as rewards
from lmgym.tasks.base import OPTIONS

ENV_OPTIONS = {"workers": int, "seconds": float}  # processes (0: none), and seconds that one call may take
DEFAULT = {"algorithm": "grpo", "env": "single_turn"}  # for a section without a name, such as {group_size: 4}


def build(cls: Any, tree: Any, where: str) -> Any:
    """A dataclass from a mapping; `where` is the dotted prefix for messages.

    Raises LmgymError for an unknown key, a value of another type and a key that is missing.

    Example: build(Sampling, {"top_k": 50}, "sampling.") -> Sampling(top_k=50)
    """
    if not isinstance(tree, Mapping):
        raise LmgymError(f"'{where.rstrip('.')}' must be a section of keys and values, not {tree!r}")
    known = {f.name: f for f in fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key in getattr(cls, "elsewhere", {}):
            raise LmgymError(f"'{where}{key}' is no key of this section: {cls.elsewhere[key]}")
        if key not in known:
            section = f" in '{where.rstrip('.')}'" if where else ""
            raise LmgymError(f"unknown key '{key}'{section}; {registry.suggest(str(key), known)}")
        values[key] = _value(hints[key], value, f"{where}{key}")
    missing = [f.name for f in known.values() if _required(f) and f.name not in values]
    if missing:
        raise LmgymError(f"'{where.rstrip('.') or 'recipe'}' lacks the key '{missing[0]}'")
    return cls(**values)


def plain(value: Any) -> Any:
    """The tree that `build` would make the same dataclass of, with every default written out.

    Example: plain(GRPO(group_size=4)) -> {"name": "grpo", "group_size": 4, ...}
    """
    if is_dataclass(value) and not isinstance(value, type):
        tree = {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"name": registry.name_of("algorithm", type(value)), **tree} if isinstance(value, Algorithm) else tree
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def check_least(section: Any, least: Mapping[str, float], where: str) -> None:
    """Raise LmgymError for a value below the smallest that makes sense, by dotted key; what is None is left out."""
    for key, smallest in least.items():
        value = section
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None and not smallest <= value < math.inf:
            raise LmgymError(f"{where}{key} is {value}; it must be at least {smallest}")


def _value(hint: Any, value: Any, key: str) -> Any:
    name = key.rsplit(".", 1)[-1]
    if name in NAMED and not isinstance(value, Algorithm) and (value is not None or not _optional(hint)):
        return _named(name, value, key)
    if name == "rewards" or key == "evaluation.metrics":
        rewards.build_rewards(registry.converted(dict[str, Any], value, key))
        return value
    section: Any = next((a for a in (hint, *typing.get_args(hint)) if is_dataclass(a)), None)
    if section is None or value is None:
        return registry.converted(hint, value, key)
    return value if isinstance(value, section) else build(section, value, key + ".")


def _named(kind: str, value: Any, key: str) -> Any:
    """`name` or {name: ..., arguments}: an algorithm becomes its dataclass, a task or env stays a checked mapping."""
    tree = {"name": value} if isinstance(value, str) else value
    tree = {"name": DEFAULT[kind], **tree} if kind in DEFAULT and isinstance(tree, Mapping) else tree
    if not isinstance(tree, Mapping) or not isinstance(tree.get("name"), str):
        raise LmgymError(f"'{key}' must be the name of one ({', '.join(registry.names(kind))}), or a section with it")
    thing = registry.get(kind, tree["name"])
    arguments = {k: v for k, v in tree.items() if k != "name"}
    if kind == "algorithm":
        return build(thing, _with_preset(thing, tree["name"], arguments, key), key + ".")
    # What `tasks.base.load_task`, `parts.make_envs` and the run itself take.
    also: tuple[str, ...] = {"task": (*OPTIONS, "split"), "env": tuple(ENV_OPTIONS)}.get(kind, ())
    own = {k: v for k, v in arguments.items() if k not in also}
    for option, hint in ENV_OPTIONS.items() if kind == "env" else ():
        if option in arguments:
            registry.converted(hint, arguments[option], f"{key}.{option}")
    own = registry.check_arguments(thing, own, key, given=1 if kind == "task" else 0, also=also)
    if kind == "env":
        thing(**own)  # an environment is built for each episode; what it refuses shows now
    return dict(tree)


def _with_preset(thing: Any, name: str, arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments, over those of the preset that they name, or that the algorithm's own name is (dapo: a grpo)."""
    given = dict(arguments)
    first = registry.name_of("algorithm", thing)
    own = name if name != first and name in thing.presets else None
    preset = given.pop("preset", own)
    if preset is None:
        return given
    if own and preset != own:
        raise LmgymError(f"'{key}.preset' is {preset!r}, and {own} is a preset of {first} itself; write name: {first}")
    if preset not in thing.presets:
        raise LmgymError(f"'{key}.preset' is {preset!r}; {registry.suggest(str(preset), thing.presets)}")
    return {**thing.presets[preset], **given}


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _required(f: Any) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
