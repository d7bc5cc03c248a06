"""An agent of the official openai client, as it is: a tool, a stream, several choices, a second conversation, a
completion. It notes what the replies say of their tokens."""

import json
import sys
from pathlib import Path

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}

task = json.loads(sys.stdin.read())
client = openai.OpenAI(max_retries=0)
assert [model.id for model in client.models.list()] == ["policy"]
messages = [{"role": "user", "content": task["prompt"]}]
ask = client.chat.completions.create
first = ask(model="policy", messages=messages, tools=[ADD], temperature=1.0)
reply = first.choices[0]
assert reply.finish_reason == "tool_calls"
[call] = reply.message.tool_calls
result = sum(json.loads(call.function.arguments).values())
messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
said = ask(model="policy", messages=messages, tools=[ADD]).choices[0].message
assert said.content == "3" and not said.tool_calls
messages += [said, {"role": "user", "content": "and now?"}]
options = {"include_usage": True}
*pieces, last = ask(model="policy", messages=messages, tools=[ADD], stream=True, stream_options=options)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert text == "streamed" and not last.choices and pieces[0].usage is None
two = ask(model="policy", messages=[{"role": "user", "content": "again"}], n=2)
both = two.choices
assert [choice.message.content for choice in both] == ["one", "two"]
ask(model="policy", messages=[{"role": "user", "content": "again"}, both[1].message, {"role": "user", "content": "?"}])
complete = client.completions.create
completed = complete(model="policy", prompt="2+2=", logprobs=0, stop="!")
assert (completed.choices[0].text, completed.choices[0].finish_reason) == ("4", "stop")
seen = completed.choices[0].logprobs
assert (seen.tokens, seen.text_offset) == (["4"], [0])
*pieces, end = complete(model="policy", prompt=["a<eos>"], stream=True, n=2, stream_options=options)
assert [piece.choices[0].text for piece in pieces] == ["b", "c"]
usages = [one.usage for one in (first, last, two, completed, end)]
assert all(one.total_tokens == one.prompt_tokens + one.completion_tokens for one in usages)
counted = [[one.prompt_tokens, one.completion_tokens] for one in usages]
Path(task["meta"]["note"]).write_text(json.dumps(counted))
for wrong in ({"prompt": [[1, 2]]}, {"prompt": "a", "echo": True}, {"prompt": "a", "logprobs": 3}):
    try:
        complete(model="policy", **wrong)
    except openai.BadRequestError:
        continue
    raise AssertionError(wrong)
try:
    ask(model="policy", messages=messages, response_format={"type": "json_object"})
except openai.BadRequestError as error:
    assert "response_format" in str(error)
    print(json.dumps({"reward": 1.0}))
