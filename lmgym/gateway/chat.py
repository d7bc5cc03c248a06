"""OpenAI's chat completions as JSON: requests are read strictly, and replies written as their clients expect them.

Source: the types of the openai client 3.57."""

import json
from collections.abc import Collection, Iterator
from typing import Any

from lmgym.core.errors import represent
from lmgym.gateway.parts import read_content
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
    read_choices,
    read_conversation,
    read_seed,
    read_stops,
    read_switch,
)

NO_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields with the values that ask for nothing special; anything else is refused.
USUAL: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
KNOWN = ("messages", "tools", "stop", "n", "seed", "logprobs", "stream", "stream_options", *NO_EFFECT)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_request(tree: Any, ignored: Collection[str] = ()) -> ChatRequest:
    """A request for a chat completion. `ignored`: fields that have no effect, as the environment says.

    Raises Refused for what no client would send, and for what is not supported.

    Example: read_request({"messages": [{"role": "user", "content": "2+2="}]}).messages[0].text -> '2+2='"""
    given = fields_of(tree, ignored, KNOWN, USUAL)
    return ChatRequest(
        read_conversation([_said(one) for one in list_of(given.get("messages"), "messages", MOST_MESSAGES)]),
        tuple(map(_tool, list_of(given.get("tools", []), "tools", MOST_TOOLS))),
        read_stops(given.get("stop", []), "stop"),
        read_choices(given.get("n", 1)),
        read_switch(given, "stream"),
        read_switch(given, "logprobs"),
        wants_usage(given.get("stream_options", {})),
        seed=read_seed(given),
    )


def wants_usage(options: Any) -> bool:
    """True if a stream shall end with the count of its tokens (`stream_options`). `include_obfuscation`, which clients
    set to false, has no effect: nothing is added to the events here."""
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused("'stream_options' may hold include_usage and include_obfuscation only")
    return read_switch(options, "include_usage")


def chat_body(answer: Answer, model: str) -> dict[str, Any]:
    """The reply as one object. Its id and date are the same in every run."""
    choices = [
        {"index": index, "message": _message(reply.said), "logprobs": _logprobs(reply), "finish_reason": reply.finish}
        for index, reply in enumerate(answer.replies)
    ]
    return {**_head(answer, model), "object": "chat.completion", "choices": choices, "usage": usage(answer)}


def chat_events(answer: Answer, request: ChatRequest, model: str) -> Iterator[bytes]:
    """The reply as server-sent events: the answers are whole when they begin, so each comes in one piece."""
    head = {**_head(answer, model), "object": "chat.completion.chunk"}
    if request.usage:
        head["usage"] = None
    for index, reply in enumerate(answer.replies):
        delta = _message(reply.said)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        for part, logprobs, finish in ((delta, _logprobs(reply), None), ({}, None, reply.finish)):
            choice = {"index": index, "delta": part, "logprobs": logprobs, "finish_reason": finish}
            yield event({**head, "choices": [choice]})
    if request.usage:
        yield event({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def usage(answer: Answer) -> dict[str, int]:
    """The tokens of the prompt, read once for all choices, and those that were sampled."""
    sampled = sum(reply.sampled for reply in answer.replies)
    return {"prompt_tokens": answer.prompt, "completion_tokens": sampled, "total_tokens": answer.prompt + sampled}


CHAT = Form(read_request, chat_body, chat_events)


def _head(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "created": 0, "model": model}


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if reply.tokens is None:
        return None
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in reply.tokens
    ]
    return {"content": tokens, "refusal": None}


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in said.calls
        ]
    return message


def _said(message: Any) -> Said:
    if not isinstance(message, dict):
        raise Refused(f"a message is {represent(message)}; it must be an object with role and content")
    role = ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
    if role is None:
        raise Refused(f"a message has the role {represent(message.get('role'))}; valid: {', '.join(ROLES)}")
    known = {"role", "content", "name", "tool_calls", "tool_call_id"}
    for key, value in message.items():  # clients send back what replies hold: refusal, annotations, audio ...
        if key not in known and value not in (None, [], {}):
            raise Refused(f"a message holds '{key[:100]}', which is not supported; leave it out")
    text, calls = read_content(message.get("content"), role in ("user", "tool")), message.get("tool_calls")
    if calls and role != "assistant":
        raise Refused("only a message of the assistant may hold 'tool_calls'")
    name, call = message.get("name") or "", message.get("tool_call_id") or ""
    if not isinstance(name, str) or not isinstance(call, str):
        raise Refused("'name' and 'tool_call_id' of a message must be texts")
    if (role == "tool") != bool(call):
        raise Refused("a message of a tool, and no other, names the call that it answers: 'tool_call_id'")
    for value in (name, call):
        check(value, "a message")
    return Said(role, text, tuple(map(_call, list_of(calls or [], "tool_calls", MOST_TOOLS))), call, name)


def _call(call: Any) -> tuple[str, str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Refused("a call of a tool must be an object with id, type: function, and function")
    id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise Refused("a call of a tool needs an id, a name, and its arguments as a text of JSON")
    for value in (id, name, arguments):
        check(value, "a call of a tool")
    return id, name, arguments


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool must be an object with type: function, and function: {name, description, parameters}")
    check(json.dumps(tool, ensure_ascii=False), "a tool")
    return dict(tool)
