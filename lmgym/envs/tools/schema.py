"""Python functions as tools: their JSON schema, and the answers to calls. parsing.py finds the calls in a text.

If a call cannot be read or made, or the tool fails, the answer is `{"error": "..."}`, for the model to read. Such a
mistake raises nothing here."""

import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.envs.step_checks import plain_or_text
from lmgym.envs.tools.calls import Call, Unreadable, shorter
from lmgym.pictures.store import is_picture, shown
from lmgym.types import Example, RecipeText, part_of, pictures_of

PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
PARAMETERS = re.compile(r"^[ \t]*(?:Args|Arguments|Parameters):[ \t]*$", re.MULTILINE)
SECTION = re.compile(r"^[ \t]*(?:Returns|Return|Yields|Raises|Examples?|Notes?):[ \t]*$", re.MULTILINE)
ENTRY = re.compile(r"^(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that a model can call. `given` is the parameter that gets the episode's example from the environment,
    if the function has one; the model does not see it.

    Example: tool("python").schema["function"]["name"] -> 'python'"""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    validators: Mapping[str, Any]  # a pydantic TypeAdapter for each parameter that the model gives
    required: tuple[str, ...]
    given: str | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to one call. `invalid`: the call was wrong, so nothing was called; `failed`: the tool raised.

    Example: Answer("42")"""

    text: str
    invalid: bool = False
    failed: bool = False


class ToolLost(Exception):
    """The program behind a tool has ended, or does not answer. The episode cannot go on, and is not trained on."""


def tool(name: str) -> Tool:
    """The tool registered under a name (`@register("tool", "name")`), or the function "module:function". Raises
    LmgymError for an unknown name, or a function without a usable signature (see `schema`)."""
    return _prepared(registry.get("tool", name))


def prepare(function: Callable[..., Any]) -> Tool:
    """A function as a tool. `schema` says what the function needs."""
    from pydantic import TypeAdapter

    described, hints = schema(function), _hints(function)
    parameters = described["function"]["parameters"]
    return Tool(
        name=function.__name__,
        function=function,
        schema=described,
        validators={name: TypeAdapter(hints[name]) for name in parameters["properties"]},
        required=tuple(parameters.get("required", ())),
        given=next((name for name, hint in hints.items() if hint is Example), None),
    )


_prepared = cache(prepare)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The function in the format of chat templates and OpenAI's API: name, description, parameters as JSON Schema.

    Types come from the signature: str, int, float, bool, None, list, dict with string keys, Literal, Optional, unions
    and Any. A parameter with a default is not required. The description is the docstring, which must have a sentence;
    its section `Args:` describes the parameters. A parameter of type Example is left out: the environment gives it.
    Raises LmgymError for anything else.

    Example: schema(python)["function"]["parameters"]["required"] -> ['code']"""
    where = f"tool '{getattr(function, '__name__', function)}'"
    description, documented = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise LmgymError(f"{where} has no docstring; the model needs a sentence that says what it does")
    # One entry for each parameter that the model gives.
    hints, properties, takes = _hints(function), dict[str, Any](), inspect.signature(function).parameters
    for name, parameter in takes.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise LmgymError(f"{where}: parameter '{name}' cannot be given by name; * and / have no JSON")
        if name not in hints:
            raise LmgymError(f"{where}: parameter '{name}' has no type; write one, such as {name}: str")
        if hints[name] is Example:
            continue
        properties[name] = _type(hints[name], f"{where}: parameter '{name}'")
        if name in documented:
            properties[name]["description"] = documented[name]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [name for name in properties if takes[name].default is inspect.Parameter.empty]:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


def begin_call(
    call: Call | Unreadable, tools: Mapping[str, Tool], example: Example, max_result_chars: int
) -> Answer | Coroutine[Any, Any, Answer]:
    """Make a call. The answer is its result (text as it is, with its pictures; a picture of Pillow's; anything else as
    JSON) or {"error": ...}, in at most `max_result_chars` characters, of which each picture is one. No mistake of the
    model or the tool raises; only ToolLost does. For a tool that is a coroutine function, or returns another awaitable,
    the answer is to be awaited, so that several calls can wait together.

    Example:
        >>> begin_call(Call("sqrt", {}), {"python": tool("python")}, example, 1000).text
        '{"error": "there is no tool \\'sqrt\\'; Valid: python."}'
    """
    if isinstance(call, Unreadable):
        return Answer(_error(call.reason, max_result_chars), invalid=True)
    # A wrong call is answered by its mistake, and the tool is not called.
    arguments, problem = _check_call(call, tools)
    if problem:
        return Answer(_error(problem, max_result_chars), invalid=True)
    chosen = tools[call.name]
    given = {chosen.given: example} if chosen.given else {}
    with _failures(max_result_chars) as failed:
        result = chosen.function(**arguments, **given)
        if inspect.isawaitable(result):
            return _awaited(result, max_result_chars)
        return Answer(cut(_text(result), max_result_chars))
    return failed[0]


async def _awaited(result: Awaitable[Any], most: int) -> Answer:
    with _failures(most) as failed:
        return Answer(cut(_text(await result), most))
    return failed[0]


@contextmanager
def _failures(most: int) -> Iterator[list[Answer]]:
    """In the body, an exception of a tool becomes the answer in the list."""
    failed: list[Answer] = []
    try:
        yield failed
    except ToolLost:
        raise
    except (Exception, SystemExit) as error:
        failed.append(Answer(_error(describe_error(error), most), failed=True))


def cut(text: str, most: int) -> str:
    """The text; if it is longer than `most` characters, its beginning and its end with a note between them. Half
    surrogates, which no tokenizer accepts, become question marks. Pictures in it stay; that parts of it could be the
    recipe's (types.RecipeText) is forgotten, so that no tool writes a control token.

    Example: cut("0123456789" * 100, 60) -> '01234567\\n[... 984 of 1000 characters left out ...]\\n23456789'"""
    if len(text) > most:
        note = f"\n[... {len(text)} of {len(text)} characters left out ...]\n"
        kept = max(most - len(note), 0)
        note = f"\n[... {len(text) - kept} of {len(text)} characters left out ...]\n"[: most - kept]
        end = len(text) - (kept - kept // 2)
        text = RecipeText.join(part_of(text, 0, kept // 2), note, part_of(text, end, len(text)))
    plain, pictures = text.encode("utf-8", "replace").decode("utf-8"), pictures_of(text)
    return RecipeText(plain, (), pictures) if pictures else plain


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, like the last line of a traceback."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # its own __str__ fails
        return type(error).__name__


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", None)
    if name is None or not callable(function) or isinstance(function, type):
        raise LmgymError(f"a tool must be a function, not {function!r}")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise LmgymError(f"tool '{name}': its type hints cannot be read: {error}") from None
    hints.pop("return", None)
    return hints


def _type(hint: Any, where: str) -> dict[str, Any]:
    """A type hint as JSON Schema."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    # From simple types to nested ones; unions come last, as their members may be any of the others.
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type(inner[0], where)} if inner else {})}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", **({"additionalProperties": _type(inner[1], where)} if inner else {})}
    if origin is Literal:
        kinds = list(dict.fromkeys(PLAIN.get(type(value), "") for value in inner))
        if all(kinds):
            return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _any_of([_type(choice, where) for choice in inner])
    raise LmgymError(
        f"{where} has a type that JSON does not know, {hint}; use str, int, float, bool, list, dict[str, ...], "
        "Literal, or a union of these"
    )


def _any_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A union: a list of types if all choices are simple; null is added to a single type or enumeration; else anyOf."""
    if all(set(choice) == {"type"} for choice in choices):
        return {"type": [choice["type"] for choice in choices]}
    real = [choice for choice in choices if choice != {"type": "null"}]
    if len(real) == 1 and isinstance(real[0].get("type"), str):
        nullable = {**real[0], "type": [real[0]["type"], "null"]}
        return {**nullable, "enum": [*real[0]["enum"], None]} if "enum" in real[0] else nullable
    return {"anyOf": choices}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each parameter in the section `Args:`."""
    head, *rest = PARAMETERS.split(text, maxsplit=1)
    documented, indent, name = dict[str, str](), 0, ""
    # A line "name: text" that is not indented further than the first begins an entry; other lines continue it.
    for line in SECTION.split(rest[0], maxsplit=1)[0].splitlines() if rest else []:
        match = ENTRY.match(line)
        if match and (not documented or len(match[1]) <= indent):
            indent, name = len(match[1]), match[2]
            documented[name] = match[3].strip()
        elif name and line.strip():
            documented[name] = f"{documented[name]} {line.strip()}".strip()
    return SECTION.split(head, maxsplit=1)[0].strip(), {name: text for name, text in documented.items() if text}


def _check_call(call: Call, tools: Mapping[str, Tool]) -> tuple[dict[str, Any], str]:
    """The arguments, converted to the types of the function, and what is wrong with the call (empty: nothing)."""
    from pydantic import ValidationError

    if call.name not in tools:
        return {}, f"there is no tool '{shorter(call.name)}'; {suggest(shorter(call.name), tools)}"
    chosen = tools[call.name]
    for name in call.arguments:
        if name not in chosen.validators:
            return {}, f"{call.name} has no argument '{shorter(name)}'; {suggest(shorter(name), chosen.validators)}"
    for name in chosen.required:
        if name not in call.arguments:
            return {}, f"{call.name} needs the argument '{name}'"
    # Strict validation: "3" is not a number.
    arguments = {}
    for name, value in call.arguments.items():
        try:
            arguments[name] = chosen.validators[name].validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(shorter(str(part)) for part in (name, *problem["loc"]))
            return {}, f"argument '{where}' of {call.name}: {shorter(problem['msg'])}"
        except (OverflowError, ValueError) as error:  # a whole number that no float can hold
            return {}, f"argument '{name}' of {call.name}: {shorter(str(error))}"
    return arguments, ""


def _text(result: Any) -> str:
    from pydantic_core import to_jsonable_python

    if isinstance(result, str):
        return result
    if is_picture(result):
        return shown(result)
    return json.dumps(to_jsonable_python(result, fallback=plain_or_text), ensure_ascii=False)


def _error(message: str, most: int) -> str:
    """An error as JSON, in at most `most` characters."""
    text = json.dumps({"error": message}, ensure_ascii=False)
    if len(text) > most:
        text = json.dumps({"error": cut(message, max(most // 2 - 20, 0))}, ensure_ascii=False)
    return cut(text, most)
