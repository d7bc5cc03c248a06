"""An agent of the official anthropic client, as it is: a tool, streams, a stop, a changed past, refusals. It notes what
the replies say of their tokens."""

import json
import sys
from pathlib import Path

import anthropic

ADD = {
    "name": "add",
    "description": "Adds two numbers",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}

task = json.loads(sys.stdin.read())
client = anthropic.Anthropic(max_retries=0)
assert [model.id for model in client.models.list()] == ["policy"]
given = {"model": "policy", "max_tokens": 100, "system": [{"type": "text", "text": "Add."}]}
ask = client.messages.create

# 1. A call, and its result.
messages = [{"role": "user", "content": task["prompt"]}]
first = ask(**given, messages=messages, tools=[ADD])
assert first.stop_reason == "tool_use" and [block.type for block in first.content] == ["text", "tool_use"]
call = first.content[1]
assert first.content[0].text == "Let me see." and (call.name, call.input) == ("add", {"a": 1, "b": 2})
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
note = {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result, note]}]
second = ask(**given, messages=messages, tools=[ADD])
assert (second.stop_reason, second.content[0].text) == ("end_turn", "3")

# 2. Streams: of a text with a stop, and of a call.
messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "and now?"}]
with client.messages.stream(**given, messages=messages, tools=[ADD], stop_sequences=["!"]) as stream:
    text = "".join(stream.text_stream)
    third = stream.get_final_message()
assert (text, third.stop_reason, third.stop_sequence) == ("streamed", "stop_sequence", "!")
with client.messages.stream(**given, messages=messages[:1], tools=[ADD]) as stream:
    fourth = stream.get_final_message()
assert fourth.content[0].input == {"a": 1, "b": "\u00e9"} and fourth.stop_reason == "tool_use"

# 3. What is refused, as the client's own errors.
wrong = [
    {"messages": messages, "temperature": 0.5},
    {"messages": messages, "thinking": {"type": "enabled", "budget_tokens": 2000}},
    {"messages": [*messages, {"role": "assistant", "content": "It"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}]},
    {"messages": messages, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
]
for one in wrong:
    try:
        client.messages.create(**{**given, **{key: one[key] for key in one if key != "temperature"}}, extra_body=one)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["message"]
        continue
    raise AssertionError(one)
try:
    anthropic.Anthropic(api_key="no", max_retries=0).messages.create(**given, messages=messages)
except anthropic.AuthenticationError:
    usages = [reply.usage for reply in (first, second, third, fourth)]
    counted = [[usage.input_tokens, usage.output_tokens] for usage in usages]
    Path(task["meta"]["note"]).write_text(json.dumps(counted))
    print(json.dumps({"reward": 1.0}))
