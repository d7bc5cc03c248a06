"""Calls of tools as FunctionGemma and Gemma 4 write them: call:weather{city:<escape>Paris<escape>,days:3}

Names have no quotation marks, and texts are between marks of their own. Sources: the models' chat templates, and
https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices. The marks are special tokens: where they
have been removed from the text, a text ends before the next name with a colon, and the tool's schema says what is a
text."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lmgym.envs.tools.calls import DECODER, Call, Unreadable, shallow, shorter, why
from lmgym.envs.tools.qwen_coder import typed

# The beginning of a call, its end, and the mark around a text.
FORMS = (("<start_function_call>", "<end_function_call>", "<escape>"), ("<|tool_call>", "<tool_call|>", '<|"|>'))
MARKS = tuple(begin for begin, _, _ in FORMS)
HEAD = re.compile(r"\s*call:([\w.-]+)\{")
BETWEEN = re.compile(r"(?<=\})\s*(?=call:[\w.-]+\{)")  # calls without marks
NAME = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
NEXT = re.compile(r",(?=[A-Za-z_][\w.-]*:)")


def calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[Call | Unreadable]:
    """The calls of the text.

    Example: list(calls("call:f{n:3,of:apples}", {})) -> [Call("f", {"n": "3", "of": "apples"})]"""
    for begin, end, mark in FORMS:
        if begin in text:
            for part in text.split(begin)[1:]:
                yield _call(part.partition(end)[0], mark, schemas)
            return
    for part in BETWEEN.split(text):
        yield _call(part, "", schemas)


def _call(text: str, mark: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call | Unreadable:
    head, text = HEAD.match(text), text.rstrip()
    if head is None or not text.endswith("}"):
        return Unreadable("a call is written as call:name{key:value}")
    name, body = head[1], text[head.end() - 1 :]
    if not mark or (mark not in body and '"' not in body):
        pairs = [pair.partition(":") for pair in NEXT.split(body[1:-1])] if body[1:-1].strip() else []
        return Call(name, {key.strip(): typed(value, name, key.strip(), schemas) for key, _, value in pairs})
    # The same as JSON: names and texts get quotation marks.
    pieces = body.split(mark)
    pieces[::2] = [NAME.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    try:
        arguments = DECODER.decode("".join(pieces))
    except (ValueError, RecursionError) as error:
        return Unreadable(f"the arguments of '{shorter(name)}' cannot be read: {why(error)}")
    if not isinstance(arguments, dict) or not shallow(arguments):
        return Unreadable(f"the arguments of '{shorter(name)}' are nested too deeply")
    return Call(name, arguments)
