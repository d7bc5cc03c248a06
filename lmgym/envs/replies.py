"""Between a program's requests and a policy's turns: tools in the prompt, and calls in the reply."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lmgym.envs.base import Branch, Step
from lmgym.envs.conversation import HOW_TO_CALL
from lmgym.envs.tools.calls import Call
from lmgym.envs.tools.parsing import CLOSE, OPEN, parse_calls, text_before_calls
from lmgym.gateway.session import Tree
from lmgym.gateway.wire import ChatRequest, Refused, Reply, Said
from lmgym.types import Message, RecipeText


def step_of(request: ChatRequest, tree: Tree, tool_prompt: str = "template", choice: int = 0) -> Step:
    """The request, for the answer of this number, as a step of an environment, which goes on where the session's tree
    says. Raises Refused for calls of tools that are not this session's, but with the tool prompt `system`.

    Example: step_of(ChatRequest((Said("user", "2+2="),)), Tree()).branch -> Branch()"""
    place, said = tree.place(request), tree.messages(request, writer(tool_prompt))
    messages, template = with_tools(said, request, tool_prompt)
    covered = place.covered + (len(messages) - len(said) if place.turn is not None else 0)
    forks = tree.count > 0 and place.turn != tree.count - 1
    seed = () if request.seed is None else (request.seed, choice)
    branch = Branch(place.turn, covered, request.stop, template, request.bare, seed)
    return Step(messages, branch=branch, info={"forks": float(forks)})


def with_tools(
    messages: Sequence[Message], request: ChatRequest, tool_prompt: str
) -> tuple[list[Message], dict[str, Any]]:
    """The messages, and the keyword arguments of the chat template. With the tool prompt `system` the tools are in the
    system message, which may be a new first one; with `template` they are an argument.

    Example: with_tools([{"role": "user", "content": "2+2="}], request, "template")[1] -> {"tools": [...]}"""
    if not request.tools:
        return list(messages), {}
    if tool_prompt != "system":
        return list(messages), {"tools": list(request.tools)}
    told = HOW_TO_CALL + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.tools)
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *others], {}
    return [{"role": "system", "content": told}, *messages], {}


def writer(tool_prompt: str) -> Callable[[Said], str] | None:
    """How the calls of an answer are written that the model has not given itself; None where only its chat template
    knows.

    Example: writer("system")(Said("assistant", "", (("a", "add", '{"a": 1}'),)))
    -> '<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>'"""
    return _write if tool_prompt == "system" else None


def _write(said: Said) -> str:
    calls = list[str]()
    for _, name, arguments in said.calls:
        try:
            tree = {"name": name, "arguments": json.loads(arguments)}
        except (ValueError, RecursionError):
            raise Refused(f"the arguments of a call of '{name[:100]}' are not JSON") from None
        calls += [RecipeText(OPEN), f"\n{json.dumps(tree, ensure_ascii=False)}\n", RecipeText(CLOSE), "\n"]
    return RecipeText.join(*([said.text, "\n"] if said.text else []), *calls[:-1])


def reply_of(text: str, stop: str, request: ChatRequest, number: int) -> Reply:
    """The policy's turn as the program reads it: without the stop string, and with the calls of tools, if all of them
    can be read. One that was cut off has no calls, as in `conversation`: the last may lack its end, and still be read.

    Example: reply_of("4", "eos", ChatRequest((Said("user", "2+2="),)), 0) -> Reply(Said("assistant", "4"), "stop")"""
    # 1. The text up to a stop string of the request.
    ends = [(text.index(end), end) for end in request.stop if stop == "stop" and end in text]
    place, ended_by = min(ends, default=(len(text), ""))
    text = text[:place]
    # 2. The calls.
    if stop in ("length", "context"):
        return Reply(Said("assistant", text), "length")
    functions = [tool["function"] for tool in request.tools]
    schemas = {one["name"]: one["parameters"] for one in functions if isinstance(one.get("parameters"), dict)}
    calls = parse_calls(text, schemas=schemas) if functions else []
    readable = [call for call in calls if isinstance(call, Call)]
    if not calls or len(readable) < len(calls):
        return Reply(Said("assistant", text), "stop", ended_by)
    made = tuple(
        (f"call_{number}_{place}", call.name, json.dumps(call.arguments, ensure_ascii=False))
        for place, call in enumerate(readable)
    )
    return Reply(Said("assistant", text_before_calls(text), made), "tool_calls")
