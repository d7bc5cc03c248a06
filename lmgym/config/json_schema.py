"""The JSON Schema of a recipe, with which editors complete and check one (`lmgym schema`).

It is made from what checks a recipe when it is read: the dataclasses of the sections with their bounds and docstrings,
and the signatures of tasks, environments and rewards. Rules on two keys, and what a plug-in registers, are not in it.
Keywords are those of draft 7, which editors know."""

import ast
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

from lmgym.config.build import ENV_OPTIONS, EnvOptions, plain, section_of
from lmgym.config.schema import STAGE_KEYS, Config, Stage
from lmgym.config.yaml import NAMED, PARTS
from lmgym.core import registry
from lmgym.core.parts import Part
from lmgym.core.validation import field_hints, hints_of, parameters_of
from lmgym.core.visible import escaped
from lmgym.rewards.base import Reward
from lmgym.rewards.building import OPTIONS as REWARD_OPTIONS
from lmgym.rewards.building import build_rewards
from lmgym.rewards.running.parallel import Parallel
from lmgym.tasks import base as tasks

Schema = dict[str, Any]
OWN = {"type": "string", "pattern": ":", "description": "module:attribute, something of your own"}


def recipe_schema(names: Callable[[str], Iterable[str]], runs: type) -> Schema:
    """The schema of a recipe in which `names(kind)` can be named; `runs` is the dataclass of its section `runs:`.

    Example: recipe_schema(registry.names, Runs)["properties"]["steps"]["minimum"] -> 1"""
    definitions: Schema = {
        "algorithm": _named([_algorithm(kind, own) for kind, own in _by_target("algorithm", names).items()]),
        "task": _named([_task(task, own) for task, own in _by_target("task", names).items()]),
        "task_options": {"properties": {**_task_options(), "split": {"type": "string"}}},
        "env": _named([_env(env, own) for env, own in _by_target("env", names).items()]),
        "env_options": {"properties": _section(EnvOptions, {})["properties"]},
        "rewards": _rewards(names("reward")),
        "reward_options": {"properties": _options(REWARD_OPTIONS, Reward, build_rewards)},
    }
    for kind in (one for one in registry.BUILTIN if one in PARTS):
        members = [_with_name(_section(part, {}), own, kind) for part, own in _by_target(kind, names).items()]
        definitions[kind] = _named(members)
    stage = _section(Stage, definitions)
    whole = _section(Config, definitions)
    stages = {"anyOf": [{"type": "array", "minItems": 1, "items": stage}, {"type": "null"}]}
    whole["properties"] |= {key: stage["properties"][key] for key in stage["properties"] if key in STAGE_KEYS}
    whole["properties"] |= {"stages": stages, "runs": {"anyOf": [_section(runs, definitions), {"type": "null"}]}}
    whole["properties"]["evaluation"] = {"anyOf": [whole["properties"]["evaluation"], {"type": "null"}]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A recipe of lmgym"}
    return {**head, **whole, "$defs": dict(sorted(definitions.items()))}


def keys_of(kind: str, name: str) -> Schema:
    """The keys that a recipe may give to one name, each with its schema; those that any of its kind has come last.

    Example: keys_of("algorithm", "dapo")["group_size"]["default"] -> 16"""
    thing = registry.get(kind, name)
    if kind == "algorithm" or (inspect.isclass(thing) and issubclass(thing, Part)):
        own: Schema = _section(thing, {})["properties"]
        for key, value in getattr(thing, "presets", {}).get(name, {}).items():
            own[key] = {**own[key], "default": plain(value)}
        return own
    if kind == "task":
        return _arguments(thing, 1)["properties"] | _task_options()
    if kind == "env":
        return _arguments(thing, 0)["properties"] | _section(EnvOptions, {})["properties"]
    if kind == "reward":
        given = 1 if getattr(thing, "takes_episodes", False) else 2
        return _arguments(thing, given)["properties"] | _options(REWARD_OPTIONS, Reward, build_rewards)
    return {}


def written(schema: Any, indent: int = 0, width: int = 120) -> str:
    """A schema as JSON text, with what is short on one line."""
    text = escaped(json.dumps(schema, ensure_ascii=False))
    if indent + len(text) <= width or not isinstance(schema, dict | list):
        return text
    inner = " " * (indent + 1)
    if isinstance(schema, list):
        items = [written(item, indent + 1, width) for item in schema]
    else:
        items = [f"{json.dumps(key)}: {written(item, indent + 1, width)}" for key, item in schema.items()]
    first, last = "[]" if isinstance(schema, list) else "{}"
    return f"{first}\n{inner}" + f",\n{inner}".join(items) + f"\n{' ' * indent}{last}"


def _section(section: Any, definitions: Schema) -> Schema:
    """A dataclass as an object. Those inside it are added to the definitions."""
    hints, described = field_hints(section), _field_docstrings(section)
    properties = {}
    for one in fields(section):
        if one.init:
            schema = _key(one.name, hints[one.name], definitions, section)
            if one.default is not MISSING:
                schema["default"] = plain(one.default)
            properties[one.name] = _described(schema, described.get(one.name, ""))
    required = [one.name for one in fields(section) if one.default is MISSING and one.default_factory is MISSING]
    return _object(properties, required, description=_summary(section))


def _key(name: str, hint: Any, definitions: Schema, section: Any) -> Schema:
    """What may stand behind one key of a section."""
    inner = section_of(hint)
    if name in NAMED:
        schema: Schema = {"$ref": f"#/$defs/{name}"}
    elif name in ("rewards", "metrics"):
        schema = {"$ref": "#/$defs/rewards"}
    elif name == "name" and section.section in registry.BUILTIN:
        return {"anyOf": [{"enum": sorted(registry.BUILTIN[section.section])}, OWN]}
    elif name == "sinks":
        return {"type": "array", "items": {"anyOf": [{"enum": sorted(registry.BUILTIN["sink"])}, OWN]}, "default": []}
    elif inner is not None and issubclass(inner, Part):
        schema = {"$ref": f"#/$defs/{inner.kind}"}
    elif inner is not None:
        definitions[inner.section or inner.__name__] = _section(inner, definitions)
        schema = {"$ref": f"#/$defs/{inner.section or inner.__name__}"}
    else:
        return _of_hint(hint)
    return {"anyOf": [schema, {"type": "null"}]} if type(None) in typing.get_args(hint) else {"allOf": [schema]}


def _of_hint(hint: Any) -> Schema:
    """pydantic's schema of a type; anything goes for a type that it does not know."""
    from pydantic import PydanticUserError, TypeAdapter

    try:
        schema = TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return {}
    return {} if "$defs" in schema else schema


def _algorithm(kind: Any, names: list[str]) -> Schema:
    schema = _section(kind, {})
    if kind.presets:
        schema["properties"]["preset"] = {
            "enum": sorted(kind.presets),
            "description": "The values of a paper or library",
        }
    return _with_name(schema, names, "algorithm")


def _task(task: Any, names: list[str]) -> Schema:
    return _with_name(_arguments(task, 1, _shared("task_options", [*tasks.OPTIONS, "split"])), names, "task")


def _env(env: Any, names: list[str]) -> Schema:
    return _with_name(_arguments(env, 0, _shared("env_options", ENV_OPTIONS)), names, "env")


def _task_options() -> Schema:
    hints = hints_of(tasks.load_task)
    return _options({option: hints[option] for option in tasks.OPTIONS}, tasks.load_task)


def _options(hints: Mapping[str, Any], *told: Any) -> Schema:
    """The keys that anything of a kind may have, and what the docstrings of `told` say of them."""
    texts = {name: [text for one in told if (text := _sentence_about(name, one))] for name in hints}
    return {name: _described(_of_hint(hint), "".join(texts[name][:1])) for name, hint in hints.items()}


def _shared(options: str, names: Iterable[str]) -> Schema:
    return {name: {"$ref": f"#/$defs/{options}/properties/{name}"} for name in names}


def _rewards(names: Iterable[str]) -> Schema:
    options = {**_shared("reward_options", REWARD_OPTIONS), "parallel": _arguments(Parallel, 0)}
    known = {}
    for name in names:
        function = registry.get("reward", name)
        given = 1 if getattr(function, "takes_episodes", False) else 2
        own = _arguments(function, given, options)
        known[name] = _described({"anyOf": [{"type": "number"}, own]}, _summary(function))
    free = {"type": ["number", "object"]}
    other = {"type": "object", "required": ["reward"], "description": "`reward` says which one judges under this name"}
    return {"type": "object", "properties": known, "patternProperties": {":": free}, "additionalProperties": other}


def _arguments(function: Any, given: int, also: Mapping[str, Schema] | None = None) -> Schema:
    """The arguments of a function, its first `given` apart, and further keys."""
    named, open_ended = parameters_of(function, given)
    hints = hints_of(function)
    described = _field_docstrings(function) if is_dataclass(function) else {}
    properties = {}
    for name, parameter in named.items():
        schema = _of_hint(hints.get(name, Any))
        if isinstance(parameter.default, bool | int | float | str):
            schema["default"] = parameter.default
        elif parameter.default is None:
            schema["default"] = None
        properties[name] = _described(schema, described.get(name) or _sentence_about(name, function))
    schema = _object({**(also or {}), **properties}, [])
    return {**schema, "additionalProperties": True} if open_ended else schema


def _named(sections: list[Schema]) -> Schema:
    """A name alone, a section with a name, or one without, which adds to that of the recipe's top level."""
    names = [name for section in sections for name in section["properties"]["name"]["enum"]]
    of_own = {"type": "object", "properties": {"name": OWN}, "required": ["name"]}
    return {"anyOf": [{"enum": names}, OWN, *sections, of_own, {"type": "object", "not": {"required": ["name"]}}]}


def _with_name(section: Schema, names: list[str], kind: str) -> Schema:
    summaries = [f"{name}: {registry.BUILTIN[kind][name].summary}" for name in names if name in registry.BUILTIN[kind]]
    properties = {"name": {"enum": names, "description": "\n".join(summaries)}, **section["properties"]}
    return {**section, "properties": properties, "required": ["name"]}


def _by_target(kind: str, names: Callable[[str], Iterable[str]]) -> dict[Any, list[str]]:
    """The things of a kind, each with all its names (dapo is a grpo)."""
    found: dict[Any, list[str]] = {}
    for name in names(kind):
        found.setdefault(registry.get(kind, name), []).append(name)
    return found


def _object(properties: Schema, required: list[str], description: str = "") -> Schema:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return _described({**schema, "required": required} if required else schema, description)


def _described(schema: Schema, text: str) -> Schema:
    return {"description": text, **schema} if text else schema


def _summary(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _sentence_about(name: str, thing: Any) -> str:
    """The first sentence of a docstring that begins with the name between backticks, or else that has it; empty
    without one.

    Example: _sentence_about("references", jsonl) -> "`prompt`, `references` and `id` are column names; ..."
    """
    text = " ".join((inspect.getdoc(thing) or "").split("\n\nExample")[0].split())
    sentences = re.split(r"(?<=\.) (?=[A-Z`])|(?: - |; )(?=`)", text)
    about = [sentence for sentence in sentences if f"`{name}`" in sentence]
    return min(about, key=lambda sentence: not sentence.startswith(f"`{name}`"), default="")


def _field_docstrings(section: Any) -> dict[str, str]:
    """The texts below the fields of a class and its bases, by field."""
    found = {}
    for kind in reversed(section.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for one, text in pairwise(getattr(tree, "body", [])):
            told = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if told and isinstance(one, ast.AnnAssign):
                found[ast.unparse(one.target)] = " ".join(ast.literal_eval(text.value).split())
    return found
