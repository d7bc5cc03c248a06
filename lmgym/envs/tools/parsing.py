"""Finds tool calls in a model's text, in the formats of today's open models.

Unreadable calls become `Unreadable` with a reason. The time is linear in the length of the text, even a hostile one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lmgym.envs.tools import gemma, qwen_coder
from lmgym.envs.tools.calls import DECODER, Call, Unreadable, shallow, shorter, why

OPEN, CLOSE, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
BARE = re.compile(r'(?:\[\s*)?\{\s*"(?:name|type|function|arguments|parameters)"\s*:')  # of Llama, or of Mistral
FIRST = re.compile(  # what the first call begins with, in the forms that have a mark
    r"(?:<tool_call>\s*)?<function=|" + "|".join(map(re.escape, (OPEN, MISTRAL, *gemma.MARKS)))
)


def parse_calls(
    text: str, most: int = 16, schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Call | Unreadable]:
    """The calls in a model's text, in order; empty if it has none.

    It reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen; the last end tag may be missing),
    `[TOOL_CALLS] [{...}]` and `[TOOL_CALLS]name[ARGS]{...}` (Mistral), the tags of Qwen3-Coder (qwen_coder.py), the
    calls of Gemma (gemma.py), and a text that begins with such an object or a list of them, with `arguments` or
    `parameters` (Llama 3, and Mistral once its special tokens are removed). Text in `<think>` is ignored. If there are
    more than `most` calls, one `Unreadable` replaces the surplus. `schemas`: of the arguments of each tool, for forms
    that do not write a value's type.

    Example:
        >>> parse_calls('<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>')
        [Call(name='python', arguments={'code': '6 * 7'})]
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    calls: list[Call | Unreadable] = []
    for call in _calls(text, schemas or {}):
        if len(calls) == most:
            return [*calls, Unreadable(f"more than {most} calls at once; those behind the first {most} were not made")]
        calls.append(call)
    return calls


def text_before_calls(text: str) -> str:
    """What a model has written before its first call, with its thoughts, which may speak of calls.

    Example: text_before_calls('Let me see. <tool_call>{"name": ...') -> 'Let me see.'"""
    thoughts, end, said = text.rpartition("</think>")
    first = FIRST.search(said)
    return (thoughts + end + (said[: first.start()] if first else "")).strip()


def _calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[Call | Unreadable]:
    # Llama: the text is the object itself.
    if BARE.match(text.lstrip()) and ('"arguments"' in text or '"parameters"' in text):
        yield from _objects(text)
        return
    # The mark that comes first says which form it is; the values of one form may hold the marks of another.
    first = FIRST.search(text)
    mark = first[0] if first else ""
    if mark.endswith(qwen_coder.OPEN):
        yield from qwen_coder.calls(text, schemas)
    elif mark in gemma.MARKS or gemma.HEAD.match(text):
        yield from gemma.calls(text, schemas)
    # Hermes and Qwen: one object between each pair of tags.
    elif mark == OPEN:
        index = text.find(OPEN)
        while index >= 0:
            begin, following = index + len(OPEN), text.find(OPEN, index + len(OPEN))
            body = text[begin : following if following >= 0 else len(text)]
            yield from _objects(body.partition(CLOSE)[0])
            index = following
    # Mistral: a list of objects after the mark, or name[ARGS]{...}.
    elif mark == MISTRAL:
        for begin in _places(text, MISTRAL):
            body = text[begin:].partition(MISTRAL)[0].lstrip()
            if body[:1] in ("[", "{"):
                yield from _objects(body)
            else:
                name, _, arguments = body.partition("{")
                yield from _objects("{" + arguments, name.partition("[")[0].strip())


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
            yield Unreadable(f"not valid JSON: {why(error)}")
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
            return Unreadable(f"the arguments are not valid JSON: {why(error)}")
    if arguments is None and "arguments" not in tree and "parameters" not in tree:
        return Unreadable(f"the call of '{shorter(tree['name'])}' has no 'arguments'")
    if not isinstance(arguments, dict):
        return Unreadable(f"the arguments of '{shorter(tree['name'])}' must be an object, {{}} where there are none")
    if not shallow(arguments):
        return Unreadable(f"the arguments of '{shorter(tree['name'])}' are nested too deeply")
    return Call(tree["name"], arguments)
