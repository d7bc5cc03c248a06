"""A program that asks again and again, in one of several ways. It writes down what it has asked, so that a test can
render the same by itself; in that, a message of the policy names its turn."""

import json
import os
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOOL = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
asked: list[dict[str, Any]] = []


def ask(messages: list[dict[str, Any]], tools: list[Any]) -> dict[str, Any]:
    """The policy's next message."""
    turn = len(asked)
    asked.append({"messages": list(messages), "tools": tools})
    sent = [{key: value for key, value in message.items() if key != "turn"} for message in messages]
    body = json.dumps({"messages": sent, **({"tools": tools} if tools else {})}).encode()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, key)
    with urllib.request.urlopen(request) as reply:
        return {**json.load(reply)["choices"][0]["message"], "turn": turn}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def roams(draw: random.Random, turns: int) -> None:
    """Conversations that go on, go back, change the past and bring tools."""
    paths: list[tuple[list[dict[str, Any]], list[Any]]] = []  # conversations that end with an answer, and their tools
    for number in range(turns):
        question, way = user(f"{number}: {draw.choice(['why', 'go', 'é', 'two  words'])}?"), draw.random()
        if not paths or way < 0.15:  # a new conversation
            system = [{"role": "system", "content": f"Be {draw.choice(['brief', 'kind'])}."}]
            messages, tools = [*system[draw.randrange(2) :], question], TOOLS if draw.random() < 0.3 else []
        else:  # it goes on, most often where it was, or behind any earlier answer
            past, tools = paths[-1] if way < 0.7 else draw.choice(paths)
            messages = [*past, question]
            if way > 0.9:  # an answer that the policy never gave
                changed = draw.choice([place for place, one in enumerate(past) if one["role"] == "assistant"])
                # What the policy has said behind it, it has not said behind this: only its words are left.
                later = [{"role": one["role"], "content": one["content"]} for one in messages[changed + 1 :]]
                messages[changed:] = [{"role": "assistant", "content": f"changed {number}"}, *later]
        paths.append(([*messages, ask(messages, tools)], tools))


def calls(draw: random.Random, turns: int) -> None:
    """A call of a tool, its result, and a question."""
    messages = [user("1+2?")]
    messages.append(ask(messages, TOOLS))
    [call] = messages[-1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 3}, call
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
    messages += [ask(messages, TOOLS), user("Sure?")]
    ask(messages, TOOLS)


def forgets(draw: random.Random, turns: int) -> None:
    """A conversation that keeps the thoughts of the first answer, and one that does not."""
    messages = [user("2+2?")]
    said = ask(messages, [])
    ask([*messages, said, user("kept?")], [])
    ask(
        [*messages, {"role": "assistant", "content": said["content"].rpartition("</think>")[2].strip()}, user("lost?")],
        [],
    )


if __name__ == "__main__":
    meta = json.load(sys.stdin)["meta"]
    globals()[sys.argv[1]](random.Random(int(os.environ["LMGYM_SEED"])), meta["turns"])
    Path(meta["note"]).write_text(json.dumps(asked))
    print(json.dumps({"reward": 1.0}))
