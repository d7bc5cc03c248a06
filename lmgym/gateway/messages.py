"""Anthropic's messages as JSON. They become the messages of a chat: `system` is the first one, each result of a tool is
one, and what an assistant's blocks say and call is one.

Source: the types of the anthropic client 2.14."""

import json
from collections.abc import Collection, Iterator
from typing import Any

from lmgym.core.errors import represent
from lmgym.gateway.parts import read_content, refuse_unknown
from lmgym.gateway.wire import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Answer,
    ChatRequest,
    Form,
    Refused,
    Reply,
    Said,
    check,
    event,
    fields_of,
    list_of,
    read_conversation,
    read_stops,
    read_switch,
)

# Each request has to have max_tokens, so it is no mistake; the recipe decides how long an answer may be.
NO_EFFECT = ("model", "metadata", "service_tier", "max_tokens", "cache_control")
USUAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "thinking": ({"type": "disabled"},),
}
KNOWN = ("messages", "system", "tools", "stop_sequences", "stream", *NO_EFFECT)
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
MOST_BLOCKS = 1000  # of a message


def read_messages(tree: Any, ignored: Collection[str] = ()) -> ChatRequest:
    """A request for a message. `ignored`: fields that have no effect, as the environment says. Raises Refused for what
    is not supported.

    Example: read_messages({"messages": [{"role": "user", "content": "2+2="}]}).messages[0].text -> '2+2='"""
    given = fields_of(tree, ignored, KNOWN, USUAL)
    messages = [Said("system", system)] if (system := read_content(_plain(given.get("system")))) else []
    for message in list_of(given.get("messages"), "messages", MOST_MESSAGES):
        messages += _said(message)
    return ChatRequest(
        read_conversation(messages),
        tuple(map(_tool, list_of(given.get("tools", []), "tools", MOST_TOOLS))),
        read_stops(given.get("stop_sequences", []), "stop_sequences"),
        stream=read_switch(given, "stream"),
    )


def message_body(answer: Answer, model: str) -> dict[str, Any]:
    """The reply as one object. Its id is the same in every run."""
    [reply] = answer.replies
    counts = {"input_tokens": answer.prompt, "output_tokens": reply.sampled}
    return {**_head(answer, model), "content": _blocks(reply.said), **_end(reply), "usage": counts}


def message_events(answer: Answer, request: ChatRequest, model: str) -> Iterator[bytes]:
    """The reply as server-sent events, each block in one piece."""
    [reply] = answer.replies
    counts = {"input_tokens": answer.prompt, "output_tokens": 0}
    start = {**_head(answer, model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
    yield _event("message_start", message=start)
    for index, block in enumerate(_blocks(reply.said)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(reply), usage={"output_tokens": reply.sampled})
    yield _event("message_stop")


MESSAGES = Form(read_messages, message_body, message_events)


def _event(name: str, **more: Any) -> bytes:
    return event({"type": name, **more}, name)


def _head(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": model}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.ended_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.ended_by}
    return {"stop_reason": REASONS[reply.finish], "stop_sequence": None}


def _blocks(said: Said) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": said.text}] if said.text else []
    calls = [
        {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
        for id, name, arguments in said.calls
    ]
    return [*texts, *calls]


def _said(message: Any) -> list[Said]:
    """The messages that the blocks of one are."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise Refused(
            f"a message is {represent(message)}; it must be an object with role (user, assistant) and content"
        )
    if unknown := [key for key in message if key not in ("role", "content")]:
        raise Refused(f"a message holds '{unknown[0][:100]}', which is not supported; leave it out")
    content, role = message.get("content"), message["role"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    said, texts, calls = list[Said](), list[Any](), list[tuple[str, str, str]]()
    for block in list_of(blocks, "content", MOST_BLOCKS):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            said.append(_result(block))
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("input"), dict):
            known = ("type", "id", "name", "input", "cache_control", "caller")
            refuse_unknown(block, known, "a block of type tool_use")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            check(arguments, "a call of a tool")
            calls.append((_named(block, "id"), _named(block, "name"), arguments))
        elif kind == "text" or (kind == "image" and role == "user"):
            texts.append(block)
        else:
            raise Refused(
                f"a message of the {role} holds {represent(block)}; blocks may be text, image, tool_use, tool_result"
            )
    text = read_content(_plain(texts), role == "user")
    if said and not text:
        return said
    return [*said, Said(role, text, tuple(calls))]


def _result(block: dict[str, Any]) -> Said:
    """The result of a call of a tool; a failed one is written as the tools of env conversation write theirs."""
    known = ("type", "tool_use_id", "content", "is_error", "cache_control")
    refuse_unknown(block, known, "a block of type tool_result")
    failed = block.get("is_error") is not None and read_switch(block, "is_error")
    text = read_content(_plain(block.get("content")), pictures=not failed)
    if failed:
        text = json.dumps({"error": text}, ensure_ascii=False)
    return Said("tool", text, call=_named(block, "tool_use_id"))


def _plain(content: Any) -> Any:
    """Blocks without what says how to cache or cite them."""
    if not isinstance(content, list):
        return content
    return [
        {key: value for key, value in block.items() if key not in ("cache_control", "citations")}
        if isinstance(block, dict)
        else block
        for block in content
    ]


def _named(block: dict[str, Any], key: str) -> str:
    name = block.get(key)
    if not isinstance(name, str) or not name:
        raise Refused(f"a block of type {block['type']} needs '{key}', a text")
    check(name, "a block")
    return name


def _tool(tool: Any) -> dict[str, Any]:
    """The tool as chat templates know it."""
    given = tool if isinstance(tool, dict) else {}
    schema = given.get("input_schema")
    if given.get("type", "custom") not in ("custom", None) or not isinstance(schema, dict):
        raise Refused("a tool must be an object with name, description and input_schema; no tool runs at the server")
    known = ("type", "name", "description", "input_schema", "cache_control", "eager_input_streaming")
    refuse_unknown(given, known, "a tool")
    function = {"name": given.get("name"), "description": given.get("description") or "", "parameters": schema}
    if not isinstance(function["name"], str) or not isinstance(function["description"], str):
        raise Refused("the name and the description of a tool must be texts")
    check(json.dumps(function, ensure_ascii=False), "a tool")
    return {"type": "function", "function": function}
