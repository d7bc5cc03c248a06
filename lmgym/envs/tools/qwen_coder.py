"""Calls of tools as Qwen3-Coder writes them: tags that name the function and its parameters, around plain values.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the model's chat template. A value has no type, so the tool's schema decides."""

from collections.abc import Iterator, Mapping
from typing import Any

from lmgym.envs.tools.calls import DECODER, Call, Unreadable, shallow, shorter

OPEN, CLOSE = "<function=", "</function>"
PARAMETER, END = "<parameter=", "</parameter>"


def calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[Call | Unreadable]:
    """The calls of the text.

    Example: list(calls("<function=f><parameter=n>\\n3\\n</parameter></function>", {})) -> [Call("f", {"n": "3"})]"""
    for part in text.split(OPEN)[1:]:
        name, closed, body = part.partition(">")
        if not closed or not name.strip():
            yield Unreadable("the tag <function=...> has no name")
            return
        yield _call(name.strip(), body.partition(CLOSE)[0], schemas)


def typed(value: str, tool: str, name: str, schemas: Mapping[str, Mapping[str, Any]]) -> Any:
    """The value of an argument, which is a text, as its schema wants it. Without a schema, and where it does not fit,
    it stays a text."""
    properties = schemas.get(tool, {}).get("properties")
    if not isinstance(properties, dict) or _may_be_text(properties.get(name)):
        return value
    for form in (value, value.lower()):  # True
        try:
            found = DECODER.decode(form.strip())
        except (ValueError, RecursionError):
            continue
        return found if shallow(found) else value
    return value


def _may_be_text(schema: Any) -> bool:
    """True if the schema allows a text, or does not say what it allows."""
    known = schema if isinstance(schema, dict) else {}
    if isinstance(known.get("enum"), list):
        return any(isinstance(value, str) for value in known["enum"])
    if (kind := known.get("type")) is not None:
        return "string" in (kind if isinstance(kind, list) else [kind])
    choices = known.get("anyOf", known.get("oneOf"))
    return not isinstance(choices, list) or any(map(_may_be_text, choices))


def _call(tool: str, body: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call | Unreadable:
    arguments = dict[str, Any]()
    for part in body.split(PARAMETER)[1:]:
        name, closed, value = part.partition(">")
        name, value = name.strip(), value.partition(END)[0]
        if not closed or not name:
            return Unreadable(f"a tag <parameter=...> of '{shorter(tool)}' has no name")
        if name in arguments:
            return Unreadable(f"the parameter '{shorter(name)}' of '{shorter(tool)}' comes twice")
        arguments[name] = typed(value.removeprefix("\n").removesuffix("\n"), tool, name, schemas)
    return Call(tool, arguments)
