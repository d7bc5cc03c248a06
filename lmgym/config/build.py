"""A recipe's plain tree to the dataclasses of config/schema.py, strictly, and back.

An unknown key is an error that names the section, the valid keys and the nearest match. No interpolation, no
inheritance between files. The resolved tree, with every default written out, is a recipe again."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from lmgym.algorithms.base import Algorithm
from lmgym.config.packaged import find_recipe
from lmgym.config.schema import STAGE_KEYS, Config, Stage
from lmgym.config.together import check_together
from lmgym.config.yaml import DEFAULT, NAMED, apply_override, check_heard, merge, read_yaml, write_yaml
from lmgym.core import registry
from lmgym.core.constraints import FormerKey, Rule
from lmgym.core.errors import LmgymError, warn
from lmgym.core.parts import Part
from lmgym.core.validation import check_arguments, converted, field_hints, metadata_of
from lmgym.envs.placement import SECONDS, limits_itself, waits_side_by_side, workers_of
from lmgym.rewards import building as rewards
from lmgym.tasks.base import OPTIONS


@dataclasses.dataclass(kw_only=True)
class EnvOptions:
    """Keys of `env:` for any environment.

    Example: EnvOptions(workers=16, seconds=10.0)"""

    workers: int | None = None
    """Processes that the environments run in; 0: none, they run in the training process. Left out: what the
    environment's class says, or 16 for one of your own (docs/environments.md)."""
    seconds: float = SECONDS
    """Longest time of one call of an environment, in another process or of a coroutine."""
    window: Annotated[int, Ge(1), Rule("it is a number of turns, 1 or more")] | None = None
    """How many of its own last turns the policy still reads, behind the first prompt. Left out: all."""
    thoughts: Literal["keep", "drop"] = "keep"
    """drop: what is between <think> and </think> is taken out of earlier turns."""


ENV_OPTIONS = field_hints(EnvOptions)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply `key=value` overrides, and build it strictly. `path`: a file, or a packaged recipe's name.

    Raises LmgymError naming the file and the line or key at fault.

    Example: load_config("quickstart", ["seed=1", "stages.rl.steps=20"])"""
    tree = read_yaml(find_recipe(path))
    for override in overrides or []:
        apply_override(tree, override, STAGE_KEYS)
    try:
        config = build_config(tree)
    except LmgymError as error:
        raise LmgymError(f"{path}: {error}") from error
    check_heard(tree, overrides or [], STAGE_KEYS)
    return config


def build_config(tree: Mapping[str, Any]) -> Config:
    """The typed tree of a recipe's plain one."""
    for plugin in converted(list[str], tree.get("plugins") or [], "plugins"):
        registry.load_plugin(plugin)
    if tree.get("runs") is not None:
        where = "add runs=null, or name one of their folders"
        raise LmgymError(f"'runs' makes it several runs, which `lmgym train` alone takes; {where}")
    valid = {f.name for f in fields(Config)} | STAGE_KEYS | {"runs"}
    for key in tree:
        if key not in valid:
            raise LmgymError(f"unknown key '{key}'; {registry.suggest(str(key), valid)}")
    whole = {key: value for key, value in tree.items() if key not in {"runs"} | STAGE_KEYS}
    if "evaluation" in whole and whole["evaluation"] is None:
        whole["evaluation"] = {"examples": 0}
    config = build(Config, {**whole, "stages": _stages(tree)}, "")
    check_together(config)
    if "split" in (config.evaluation.task or {}):
        raise LmgymError("unknown key 'evaluation.task.split'; the split is evaluation.split")
    return config


def resolved(config: Config) -> dict[str, Any]:
    """The plain tree of a config with every default written out; itself a recipe."""
    tree: dict[str, Any] = plain(config)
    for stage in tree["stages"]:
        if stage["epochs"] is not None:  # from which the steps are computed
            del stage["steps"]
    return tree


def dump(config: Config) -> str:
    """The resolved tree as YAML."""
    return write_yaml(resolved(config))


def build(cls: Any, tree: Any, where: str) -> Any:
    """A dataclass from a mapping; `where` is the dotted prefix for messages.

    Raises LmgymError for an unknown key, a value of another type or out of bounds, and a key that is missing.

    Example: build(Sampling, {"top_k": 50}, "sampling.") -> Sampling(top_k=50)"""
    if not isinstance(tree, Mapping):
        raise LmgymError(f"'{where.rstrip('.')}' must be a section of keys and values, not {tree!r}")
    known = {f.name: f for f in fields(cls) if f.init}
    hints = field_hints(cls)
    values = {}
    parts = {f.name: f.default for f in known.values() if isinstance(f.default, Part) and f.name in tree}
    for key, value in _over(parts, with_present_keys(cls, tree, where)).items():
        if key in getattr(cls, "elsewhere", {}):
            raise LmgymError(f"'{where}{key}' is no key of this section: {cls.elsewhere[key]}")
        if key not in known:
            section = f" in '{where.rstrip('.')}'" if where else ""
            raise LmgymError(f"unknown key '{key}'{section}; {registry.suggest(str(key), known)}")
        values[key] = _value(hints.get(key, Any), value, f"{where}{key}")
    missing = [f.name for f in known.values() if _required(f) and f.name not in values]
    if missing:
        raise LmgymError(f"'{where.rstrip('.') or 'recipe'}' lacks the key '{missing[0]}'")
    return cls(**values)


def plain(value: Any) -> Any:
    """The tree that `build` would make the same dataclass of, with every default written out.

    Example: plain(GRPO(group_size=4)) -> {"name": "grpo", "group_size": 4, ...}"""
    if is_dataclass(value) and not isinstance(value, type):
        tree = {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
        kind = "algorithm" if isinstance(value, Algorithm) else value.kind if isinstance(value, Part) else None
        return {"name": registry.name_of(kind, type(value)), **tree} if kind else tree
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def section_of(hint: Any) -> Any:
    """The dataclass that a type hint names, alone or beside None; None if there is none."""
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def with_present_keys(cls: Any, tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tree with the former names of fields (`FormerKey`) replaced by those of today, each with a warning."""
    today = {
        former.name: name for name, hint in field_hints(cls).items() for former in metadata_of(hint)
        if isinstance(former, FormerKey)
    }  # fmt: skip
    for former in today.keys() & tree.keys():
        if today[former] in tree:
            raise LmgymError(f"'{where}{former}' is the former name of '{where}{today[former]}'; remove one of them")
        warn(f"'{where}{former}' is now called '{where}{today[former]}'", FutureWarning, stacklevel=2)
    return {today.get(key, key): value for key, value in tree.items()}


def _stages(tree: Mapping[str, Any]) -> list[Stage]:
    """The stages of a recipe, each over the defaults at its top level."""
    base = {key: value for key, value in tree.items() if key in STAGE_KEYS}
    given = tree.get("stages")
    if given is not None and (not isinstance(given, list) or not given):
        raise LmgymError("'stages' must be a list of at least one stage; without stages, leave the key out")
    stages = []
    for number, own in enumerate(given or [{}]):
        if not isinstance(own, dict):
            raise LmgymError(f"stages.{number} must be a mapping of keys to values")
        where = f"stages.{own.get('name', number)}." if given else ""
        for tree, place in ((base, ""), (own, where)):
            if tree.get("epochs") is not None and tree.get("steps") is not None:
                twice = f"'{place}steps' and '{place}epochs' say the same twice"
                raise LmgymError(f"{twice}; remove one of them, or set it to null")
        if own.get("steps") is not None:
            own = {"epochs": None, **own}
        whole = merge(base, own)
        if whole.get("epochs") is not None and whole.get("steps") is None:
            whole.pop("steps", None)
        stage = build(Stage, whole, where)
        if not stage.task and not getattr(registry.get("env", stage.env["name"]), "needs_data", True):
            stage.task = {"name": "episodes"}
        stages.append(stage)
    return stages


def _value(hint: Any, value: Any, key: str) -> Any:
    name = key.rsplit(".", 1)[-1]
    if key == "stages":
        return value
    if name in NAMED and not isinstance(value, Algorithm) and (value is not None or not _optional(hint)):
        return _named(name, value, key)
    if name == "rewards" or key == "evaluation.metrics":
        rewards.build_rewards(converted(dict[str, Any], value, key))
        return value
    section = section_of(hint)
    if section is not None and issubclass(section, Part):
        return _part(section, value, key)
    if section is None or value is None:
        return converted(hint, value, key)
    return value if isinstance(value, section) else build(section, value, key + ".")


def _named(kind: str, value: Any, key: str) -> Any:
    """`name` or {name: ..., arguments}: an algorithm becomes its dataclass, a task or env stays a checked mapping."""
    given = {"name": DEFAULT[kind], **value} if kind in DEFAULT and isinstance(value, Mapping) else value
    tree, name, arguments = _with_name(given, kind, key)
    thing = registry.get(kind, name)
    if kind == "algorithm":
        if not (isinstance(thing, type) and issubclass(thing, Algorithm)):
            raise LmgymError(f"'{key}': {name} is no algorithm; name a class that extends lmgym.Algorithm")
        own = with_present_keys(thing, arguments, key + ".")
        own = thing.in_present_keys(name, own, key + ".")
        return build(thing, _with_preset(thing, name, own, key), key + ".")
    # What `load_task`, `make_envs` and the run itself take.
    also: tuple[str, ...] = {"task": (*OPTIONS, "split"), "env": tuple(ENV_OPTIONS)}.get(kind, ())
    own = {k: v for k, v in arguments.items() if k not in also}
    for option, hint in ENV_OPTIONS.items() if kind == "env" else ():
        if option in arguments:
            converted(hint, arguments[option], f"{key}.{option}")
    own = check_arguments(thing, own, key, given=1 if kind == "task" else 0, also=also)
    if kind == "env":
        for option in ("workers", "window", "thoughts") if limits_itself(thing) else ():
            if arguments.get(option) not in (None, 0, "keep"):
                raise LmgymError(
                    f"'{key}.{option}' does not go with {name}, whose episodes are processes of their own and "
                    "decide on their past themselves; leave it out"
                )
        if "seconds" in arguments and not workers_of(tree)[0] and not waits_side_by_side(thing):
            raise LmgymError(
                f"'{key}.seconds' limits calls in other processes, and this environment runs in the training process; "
                f"write '{key}.workers' as well, such as 2"
            )
        thing(**own)  # an environment is built for each episode; what it refuses shows now
    return tree


def _with_name(value: Any, kind: str, key: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """`name` or {name: ..., arguments} as the latter, its name, and its arguments."""
    tree = {"name": value} if isinstance(value, str) else value
    if not isinstance(tree, Mapping) or not isinstance(tree.get("name"), str):
        raise LmgymError(f"'{key}' must be the name of one ({', '.join(registry.names(kind))}), or a section with it")
    return dict(tree), tree["name"], {name: item for name, item in tree.items() if name != "name"}


def _part(base: type[Part], value: Any, key: str) -> Part:
    """`name` or {name: ..., fields}: the part of that name."""
    if isinstance(value, Part):
        return value
    _, name, fields = _with_name(value, base.kind, key)
    thing = registry.get(base.kind, name)
    if not (isinstance(thing, type) and issubclass(thing, base)):
        raise LmgymError(f"'{key}': {name} is no {base.kind}; name a class that extends {base.__name__}")
    part: Part = build(thing, fields, key + ".")
    return part


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
    if not isinstance(preset, str) or preset not in thing.presets:
        raise LmgymError(f"'{key}.preset' is {preset!r}; {registry.suggest(str(preset), thing.presets)}")
    return _over(thing.presets[preset], given)


def _over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys over those of a base. A part without a name, or with the same one, goes over the base's key by
    key."""
    whole = dict(base)
    for key, value in given.items():
        before = plain(base[key]) if isinstance(base.get(key), Part) else {}
        goes_over = before and isinstance(value, Mapping) and value.get("name", before["name"]) == before["name"]
        whole[key] = merge(before, value) if goes_over else value
    return whole


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _required(f: Any) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
