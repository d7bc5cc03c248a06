"""The calls of tools in a model's text, as today's open models write them.

Hostile text is answered by a reason, in time that grows with its length alone.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
BARE = re.compile(r'\s*\[?\s*\{\s*"(?:name|type|function|arguments|parameters)"\s*:')  # of Llama, or of Mistral
DEEPEST = 50  # lists and objects in each other
LONGEST = 1_000  # digits of a whole number


@dataclass(frozen=True)
class Call:
    """One call that a model has written.

    Example: Call("python", {"code": "6 * 7"})
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """Something that was meant as a call but cannot be read.

    Example: Unreadable("not valid JSON: Expecting value: line 1 column 9 (char 8)")
    """

    reason: str


def parse_calls(text: str, most: int = 16) -> list[Call | Unreadable]:
    """The calls in a model's text, in order; empty where it calls nothing.

    Read are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen; the last may lack its end),
    `[TOOL_CALLS] [{...}]` and `[TOOL_CALLS]name[ARGS]{...}` (Mistral), and a text that begins with such an object or
    a list of them, with `arguments` or `parameters` (Llama 3, and Mistral once its special tokens are removed). A
    thought (`<think>`) calls nothing. Of more than `most` calls the others are answered by one error.

    Example:
        >>> parse_calls('<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>')
        [Call(name='python', arguments={'code': '6 * 7'})]
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    found: list[Call | Unreadable] = []
    for call in _calls(text):
        if len(found) == most:
            return [*found, Unreadable(f"more than {most} calls at once; those behind the first {most} were not made")]
        found.append(call)
    return found


def shorter(text: str, most: int = 80) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= most else text[:most] + "..."


def _calls(text: str) -> Iterator[Call | Unreadable]:
    if OPEN in text:
        index = text.find(OPEN)
        while index >= 0:
            begin, following = index + len(OPEN), text.find(OPEN, index + len(OPEN))
            body = text[begin : following if following >= 0 else len(text)]
            yield from _objects(body.partition(CLOSE)[0])
            index = following
    elif MISTRAL in text:
        for begin in _places(text, MISTRAL):
            body = text[begin:].partition(MISTRAL)[0].lstrip()
            if body[:1] in ("[", "{"):
                yield from _objects(body)
            else:
                name, _, arguments = body.partition("{")
                yield from _objects("{" + arguments, name.partition("[")[0].strip())
    elif BARE.match(text) and ('"arguments"' in text or '"parameters"' in text):
        yield from _objects(text)


def _places(text: str, mark: str) -> Iterator[int]:
    index = text.find(mark)
    while index >= 0:
        yield index + len(mark)
        index = text.find(mark, index + len(mark))


def _objects(text: str, name: str | None = None) -> Iterator[Call | Unreadable]:
    """The call, or the list of calls, or calls separated by ';', that the text begins with; `name`: only arguments."""
    rest = text.strip()
    while True:
        try:
            found, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield Unreadable(f"not valid JSON: {_why(error)}")
            return
        for one in found if isinstance(found, list) else [found]:
            yield _call(one if name is None else {"name": name, "arguments": one})
        rest = rest[end:].lstrip()
        if name is not None or not rest.startswith((";", ",")):
            return
        rest = rest[1:].lstrip()


def _call(one: Any) -> Call | Unreadable:
    if isinstance(one, dict) and isinstance(one.get("function"), dict):
        one = one["function"]  # as in OpenAI's messages
    if not isinstance(one, dict) or not isinstance(one.get("name"), str):
        return Unreadable('a call is an object such as {"name": "...", "arguments": {...}}')
    arguments = one.get("arguments", one.get("parameters"))
    if isinstance(arguments, str):  # as in OpenAI's messages
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return Unreadable(f"the arguments are not valid JSON: {_why(error)}")
    if arguments is None and "arguments" not in one and "parameters" not in one:
        return Unreadable(f"the call of '{shorter(one['name'])}' has no 'arguments'")
    if not isinstance(arguments, dict):
        return Unreadable(f"the arguments of '{shorter(one['name'])}' must be an object, {{}} where there are none")
    if not _shallow(arguments):
        return Unreadable(f"the arguments of '{shorter(one['name'])}' are nested too deeply")
    return Call(one["name"], arguments)


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level if isinstance(one, list | dict) for inner in _inside(one)]
        if not level:
            return True
    return False


def _inside(one: list[Any] | dict[str, Any]) -> list[Any]:
    return one if isinstance(one, list) else list(one.values())


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else shorter(str(error), 120)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{shorter(name)}' comes twice")
        found[name] = value
    return found


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
