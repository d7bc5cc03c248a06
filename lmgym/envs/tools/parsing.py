"""Finds tool calls in a model's text, in the formats of today's open models.

Unreadable calls become `Unreadable` with a reason. The time is linear in the length of the text, even a hostile one."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
BARE = re.compile(r'\s*\[?\s*\{\s*"(?:name|type|function|arguments|parameters)"\s*:')  # of Llama, or of Mistral
DEEPEST = 50  # nested lists and objects
LONGEST = 1_000  # digits of a whole number


@dataclass(frozen=True)
class Call:
    """One tool call of a model.

    Example: Call("python", {"code": "6 * 7"})"""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A call that cannot be read, and the reason.

    Example: Unreadable("not valid JSON: Expecting value: line 1 column 9 (char 8)")"""

    reason: str


def parse_calls(text: str, most: int = 16) -> list[Call | Unreadable]:
    """The calls in a model's text, in order; empty if it has none.

    It reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen; the last end tag may be missing),
    `[TOOL_CALLS] [{...}]` and `[TOOL_CALLS]name[ARGS]{...}` (Mistral), and a text that begins with such an object or
    a list of them, with `arguments` or `parameters` (Llama 3, and Mistral once its special tokens are removed). Text
    in `<think>` is ignored. If there are more than `most` calls, one `Unreadable` replaces the surplus.

    Example:
        >>> parse_calls('<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>')
        [Call(name='python', arguments={'code': '6 * 7'})]
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    calls: list[Call | Unreadable] = []
    for call in _calls(text):
        if len(calls) == most:
            return [*calls, Unreadable(f"more than {most} calls at once; those behind the first {most} were not made")]
        calls.append(call)
    return calls


def shorter(text: str, most: int = 80) -> str:
    """The text; if it is longer than `most` characters, its beginning and three dots."""
    return text if len(text) <= most else text[:most] + "..."


def _calls(text: str) -> Iterator[Call | Unreadable]:
    # Hermes and Qwen: one object between each pair of tags.
    if OPEN in text:
        index = text.find(OPEN)
        while index >= 0:
            begin, following = index + len(OPEN), text.find(OPEN, index + len(OPEN))
            body = text[begin : following if following >= 0 else len(text)]
            yield from _objects(body.partition(CLOSE)[0])
            index = following
    # Mistral: a list of objects after the mark, or name[ARGS]{...}.
    elif MISTRAL in text:
        for begin in _places(text, MISTRAL):
            body = text[begin:].partition(MISTRAL)[0].lstrip()
            if body[:1] in ("[", "{"):
                yield from _objects(body)
            else:
                name, _, arguments = body.partition("{")
                yield from _objects("{" + arguments, name.partition("[")[0].strip())
    # Llama: the text is the object itself.
    elif BARE.match(text) and ('"arguments"' in text or '"parameters"' in text):
        yield from _objects(text)


def _places(text: str, mark: str) -> Iterator[int]:
    index = text.find(mark)
    while index >= 0:
        yield index + len(mark)
        index = text.find(mark, index + len(mark))


def _objects(text: str, name: str | None = None) -> Iterator[Call | Unreadable]:
    """The calls at the beginning of the text: one, a list, or several separated by ';'. With `name`, the text is the
    arguments only."""
    rest = text.strip()
    while True:
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield Unreadable(f"not valid JSON: {_why(error)}")
            return
        for item in value if isinstance(value, list) else [value]:
            yield _call(item if name is None else {"name": name, "arguments": item})
        rest = rest[end:].lstrip()
        if name is not None or not rest.startswith((";", ",")):
            return
        rest = rest[1:].lstrip()


def _call(tree: Any) -> Call | Unreadable:
    if isinstance(tree, dict) and isinstance(tree.get("function"), dict):
        tree = tree["function"]  # as in OpenAI's messages
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return Unreadable('a call is an object such as {"name": "...", "arguments": {...}}')
    # Arguments are an object, or (OpenAI) a text of JSON with one.
    arguments = tree.get("arguments", tree.get("parameters"))
    if isinstance(arguments, str):  # as in OpenAI's messages
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return Unreadable(f"the arguments are not valid JSON: {_why(error)}")
    if arguments is None and "arguments" not in tree and "parameters" not in tree:
        return Unreadable(f"the call of '{shorter(tree['name'])}' has no 'arguments'")
    if not isinstance(arguments, dict):
        return Unreadable(f"the arguments of '{shorter(tree['name'])}' must be an object, {{}} where there are none")
    if not _shallow(arguments):
        return Unreadable(f"the arguments of '{shorter(tree['name'])}' are nested too deeply")
    return Call(tree["name"], arguments)


def _shallow(value: Any) -> bool:
    # Level by level, without recursion: the text may be hostile.
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for item in level if isinstance(item, list | dict) for inner in _inside(item)]
        if not level:
            return True
    return False


def _inside(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else shorter(str(error), 120)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"the key '{shorter(name)}' comes twice")
        tree[name] = value
    return tree


def _whole(digits: str) -> int:
    if len(digits) > LONGEST:
        raise ValueError(f"{shorter(digits)} is too large a number")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shorter(digits)} is too large a number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_no_constant
)
