"""Prompts of rows: texts, or chat messages in the forms that data sets have, with tools and calls of them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.types import Message

ROLES = {  # how data sets call them, and how chat templates do
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
BESIDE = ("name", "tool_calls", "tool_call_id")  # what a message may have beside role and content
WHITE_OR_LIST = tuple(" \t\r\n[")  # how a JSON list may begin
Prompt = str | list[Message]


def as_prompt(
    value: Any, name: str, where: str, continued: bool = False, shown: Callable[[Any], Any] | None = None
) -> Prompt:
    """A prompt, checked: a text, or chat messages in any of the usual forms (`messages_of`), of which the last may be
    the assistant's where it can be `continued`. `shown` puts pictures into it (rows/pictures.py). Raises LmgymError for
    anything else; `name` is the column's and `where` "PATH:LINE" for the message."""
    if isinstance(value, str) and value[:1] in WHITE_OR_LIST and (listed := _listed(value)):
        value = listed
    if shown is not None:
        value = shown(value)
    if isinstance(value, str) and value:
        return value
    messages = messages_of(value, name, where)
    begun = continued and len(messages) > 1 and messages[-1]["role"] == "assistant"
    if messages[-1]["role"] not in ("user", "tool") and not begun:
        raise LmgymError(f"{where}: the last message in column '{name}' must be the user's, for the model to answer")
    return messages


def with_tools(prompt: Prompt, row: Mapping[str, Any], name: str | None, where: str) -> Prompt:
    """A prompt with the tools of the row's column `name`, if it has one: a list of JSON schemas, also as JSON text, or
    nothing. They stand beside the first message that is not the system's; a text becomes a message of the user, since
    only a chat template can write tools. Raises LmgymError for a column that holds anything else.

    Example: with_tools("2+2?", {"tools": [{"name": "add"}]}, "tools", "") ->
        [{"role": "user", "content": "2+2?", "tools": [{"name": "add"}]}]"""
    value = given = None if name is None else row.get(name)
    if isinstance(given, str) and given:
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        if not value:
            return prompt
        messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        place = next((n for n, one in enumerate(messages) if one["role"] != "system"), 0)
        messages[place] = {**messages[place], "tools": [_without_nulls(one) for one in value]}
        return messages
    if not given or given == "null":
        return prompt
    raise LmgymError(
        f"{where}: column '{name}' must hold a list of JSON schemas of tools, for the chat template, got "
        f"{represent(given)}; task.tools names another column, and task.tools: null none"
    )


def _without_nulls(value: Any) -> Any:
    """Schemas, or calls, without the nulls that parquet and arrow give to keys that other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def messages_of(value: Any, name: str, where: str) -> list[Message]:
    """Chat messages as OpenAI's and ShareGPT's data sets write them ({"role", "content"} or {"from", "value"}), with
    contents that are texts or parts of text, or one message alone. Raises LmgymError for others."""
    value = [value] if isinstance(value, dict) and ("role" in value or "from" in value) else value
    if not isinstance(value, list) or not value:
        raise LmgymError(
            f"{where}: column '{name}' must hold a text or a list of chat messages, got {represent(value)}"
        )
    return [_message(one, name, where) for one in value]


def _message(message: Any, name: str, where: str) -> Message:
    names = ("from", "value") if isinstance(message, dict) and "from" in message else ("role", "content")
    own = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role = own.get(names[0])
    if not isinstance(role, str) or role not in ROLES or not {*own} <= {*names, *BESIDE}:
        raise LmgymError(
            f"{where}: a message in column '{name}' must have a role ({', '.join(dict.fromkeys(ROLES.values()))}) and "
            f"a content, nothing else, got {represent(message)}"
        )
    content = own.get(names[1], "" if own.get("tool_calls") else None)
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise LmgymError(f"{where}: a message's content in column '{name}' must be a text, got {represent(content)}")
    beside = {key: own[key] for key in BESIDE if own.get(key)}
    if "tool_calls" in beside:
        beside["tool_calls"] = _with_objects(_without_nulls(beside["tool_calls"]))
    return {"role": ROLES[role], "content": content, **beside}


def _with_objects(calls: Any) -> Any:
    """Tool calls with arguments that are objects, which chat templates write as JSON. OpenAI gives them as JSON text,
    and of a text some templates make JSON once more."""
    if isinstance(calls, list):
        return [_with_objects(one) for one in calls]
    if not isinstance(calls, dict):
        return calls
    made = {**calls, "function": _with_objects(calls["function"])} if "function" in calls else {**calls}
    try:
        read = json.loads(made["arguments"]) if isinstance(made.get("arguments"), str) else None
    except (ValueError, RecursionError):
        read = None
    return {**made, "arguments": read} if isinstance(read, dict) else made


def _listed(text: str) -> list[Any] | None:
    """The messages of a text that is a JSON list of them; None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return value if is_chat and all("role" in one or "from" in one for one in value) else None
