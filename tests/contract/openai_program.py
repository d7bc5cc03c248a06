"""An agent of the official openai client, as it is: a tool, a stream, several choices, a second conversation."""

import json
import sys

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
reply = ask(model="policy", messages=messages, tools=[ADD], temperature=1.0).choices[0]
assert reply.finish_reason == "tool_calls"
[call] = reply.message.tool_calls
result = sum(json.loads(call.function.arguments).values())
messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
said = ask(model="policy", messages=messages, tools=[ADD]).choices[0].message
assert said.content == "3" and not said.tool_calls
messages += [said, {"role": "user", "content": "and now?"}]
pieces = ask(model="policy", messages=messages, tools=[ADD], stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert text == "streamed"
both = ask(model="policy", messages=[{"role": "user", "content": "again"}], n=2).choices
assert [choice.message.content for choice in both] == ["one", "two"]
ask(model="policy", messages=[{"role": "user", "content": "again"}, both[1].message, {"role": "user", "content": "?"}])
try:
    ask(model="policy", messages=messages, response_format={"type": "json_object"})
except openai.BadRequestError as error:
    assert "response_format" in str(error)
    print(json.dumps({"reward": 1.0}))
