"""OpenAI's chat completions as JSON: requests are read strictly, and replies written as their clients expect them.

What a request asks for and the gateway does not do is refused with a sentence; nothing is left out in silence."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import represent
from lmgym.core.validation import check_text

MOST_CHARACTERS = 1_000_000  # of all messages of a request
MOST_MESSAGES, MOST_TOOLS, MOST_STOPS, MOST_CHOICES = 10_000, 128, 16, 128
DEEPEST = 64  # lists and objects in each other
# On these the recipe decides; the environment may say to ignore them.
SAMPLING = (
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"),
    *("presence_penalty", "frequency_penalty"),
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
KNOWN = ("messages", "tools", "stop", "n", "logprobs", "stream", "stream_options", *SAMPLING, *NO_EFFECT, *USUAL)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(Exception):
    """A request that is not answered: the status of HTTP, and a sentence for the program."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Said:
    """A message of a request, or the model's answer: text, and the calls of tools as (id, name, arguments in JSON).

    Example: Said("tool", "408", call="call_0_0")"""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call: str = ""  # the id of the call that a tool answers
    name: str = ""


@dataclass(frozen=True)
class ChatRequest:
    """What a program asks. `choices` answers are wanted.

    Example: ChatRequest((Said("user", "2+2="),))"""

    messages: tuple[Said, ...]
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class Reply:
    """An answer of the model, and why it ended: "stop", "length" or "tool_calls"; if the request wants them, its tokens
    as texts with their log-probabilities.

    Example: Reply(Said("assistant", "4"), "stop")"""

    said: Said
    finish: str
    tokens: tuple[tuple[str, float], ...] | None = None


@dataclass
class Answer:
    """All choices of one request, for its number in the session.

    Example: Answer(3, [Reply(Said("assistant", "4"), "stop")])"""

    number: int
    replies: list[Reply] = field(default_factory=list)


def read_json(body: bytes) -> Any:
    """The value of a JSON text. Raises Refused for anything else, and for one that is nested too deeply."""
    try:
        tree = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON in UTF-8: {str(error)[:200]}") from None
    level = [tree]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return tree
    raise Refused(f"the body has more than {DEEPEST} lists and objects in each other")


def read_request(tree: Any, ignored: Sequence[str] = ()) -> ChatRequest:
    """A request for a chat completion. `ignored`: fields that have no effect, as the environment says.

    Raises Refused for what no client would send, and for what is not supported.

    Example: read_request({"messages": [{"role": "user", "content": "2+2="}]}).messages[0].text -> '2+2='"""
    if not isinstance(tree, dict):
        raise Refused('the body must be an object such as {"messages": [...]}')
    given = {key: value for key, value in tree.items() if value is not None and key not in ignored}
    for key, value in given.items():
        if key not in KNOWN:
            raise Refused(f"'{key[:100]}' is not supported; leave it out")
        if key in SAMPLING:
            raise Refused(
                f"the recipe's `sampling:` decides on {key}; leave it out, or let the environment ignore it "
                f"(ignored: [{key}])"
            )
        if key in USUAL and not any(type(value) is type(usual) and value == usual for usual in USUAL[key]):
            raise Refused(f"'{key}' may only be {' or '.join(map(json.dumps, USUAL[key]))}, not {represent(value)}")
    stop = given.get("stop", [])
    stops = _list([stop] if isinstance(stop, str) else stop, "stop", MOST_STOPS)
    if not all(isinstance(text, str) and text for text in stops):
        raise Refused("'stop' must be a text or a list of texts, none of them empty")
    for text in stops:
        _check(text, "'stop'")
    choices = given.get("n", 1)
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise Refused(f"'n' must be a number from 1 to {MOST_CHOICES}, not {represent(choices)}")
    stream, logprobs = given.get("stream", False), given.get("logprobs", False)
    if type(stream) is not bool or type(logprobs) is not bool:
        raise Refused("'stream' and 'logprobs' must be true or false")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused("'stream_options' may hold include_usage only")
    tools = tuple(map(_tool, _list(given.get("tools", []), "tools", MOST_TOOLS)))
    return ChatRequest(_messages(given.get("messages")), tools, tuple(stops), choices, stream, logprobs)


def chat_body(answer: Answer, model: str) -> dict[str, Any]:
    """The reply as one object. Its id and date are the same in every run; tokens are not counted in it."""
    choices = [
        {"index": index, "message": _message(reply.said), "logprobs": _logprobs(reply), "finish_reason": reply.finish}
        for index, reply in enumerate(answer.replies)
    ]
    return {**_head(answer, model), "object": "chat.completion", "choices": choices}


def chat_events(answer: Answer, model: str) -> Iterator[bytes]:
    """The reply as server-sent events: the answers are whole when they begin, so each comes in one piece."""
    head = {**_head(answer, model), "object": "chat.completion.chunk"}
    for index, reply in enumerate(answer.replies):
        delta = _message(reply.said)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        for part, logprobs, finish in ((delta, _logprobs(reply), None), ({}, None, reply.finish)):
            choice = {"index": index, "delta": part, "logprobs": logprobs, "finish_reason": finish}
            yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


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


def _messages(given: Any) -> tuple[Said, ...]:
    messages = tuple(map(_said, _list(given, "messages", MOST_MESSAGES)))
    if not messages or not any(message.text.strip() for message in messages):
        raise Refused("'messages' hold no text")
    if messages[-1].role == "assistant":
        raise Refused("the last message is the assistant's; going on with a message is not supported")
    if sum(len(message.text) for message in messages) > MOST_CHARACTERS:
        raise Refused(f"'messages' hold more than {MOST_CHARACTERS:,} characters", 413)
    return messages


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
    text, calls = _text(message.get("content")), message.get("tool_calls")
    if calls and role != "assistant":
        raise Refused("only a message of the assistant may hold 'tool_calls'")
    name, call = message.get("name") or "", message.get("tool_call_id") or ""
    if not isinstance(name, str) or not isinstance(call, str):
        raise Refused("'name' and 'tool_call_id' of a message must be texts")
    if (role == "tool") != bool(call):
        raise Refused("a message of a tool, and no other, names the call that it answers: 'tool_call_id'")
    for value in (name, call):
        _check(value, "a message")
    return Said(role, text, tuple(map(_call, _list(calls or [], "tool_calls", MOST_TOOLS))), call, name)


def _text(content: Any) -> str:
    """A message's content, which may come in parts."""
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, "content", 1000)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused('\'content\' must be a text, or a list of parts such as {"type": "text", "text": ...}')
    text = "".join(part["text"] for part in parts)
    _check(text, "a message")
    return text


def _call(call: Any) -> tuple[str, str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Refused("a call of a tool must be an object with id, type: function, and function")
    id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise Refused("a call of a tool needs an id, a name, and its arguments as a text of JSON")
    for value in (id, name, arguments):
        _check(value, "a call of a tool")
    return id, name, arguments


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool must be an object with type: function, and function: {name, description, parameters}")
    _check(json.dumps(tool, ensure_ascii=False), "a tool")
    return dict(tool)


def _list(value: Any, name: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise Refused(f"'{name}' must be a list of at most {most}")
    return value


def _check(text: str, where: str) -> None:
    try:
        check_text(text, where)
    except ValueError as error:
        raise Refused(str(error)) from None


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
