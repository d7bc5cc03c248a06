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
    schema = properties.get(name) if isinstance(properties, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or "string" in kinds:
        return value
    for form in (value, value.lower()):  # True
        try:
            found = DECODER.decode(form.strip())
        except (ValueError, RecursionError):
            continue
        return found if shallow(found) else value
    return value


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
