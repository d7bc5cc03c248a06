"""A program that knows nothing of lmgym: it asks an OpenAI endpoint by urllib, in one of several ways."""

import asyncio
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ask(messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    given = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, given | (headers or {}))
    with urllib.request.urlopen(request) as reply:
        said = reply.read()
    if more.get("stream"):
        return [json.loads(line[6:]) for line in said.decode().split("\n\n") if line[6:] and line != "data: [DONE]"]
    return json.loads(said)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(messages, **more)["choices"][0]["message"]
    return found


def talk(task: dict[str, Any]) -> float:
    """Two questions, the second after the answer to the first."""
    first = [user(task["prompt"])]
    said = answer(first)
    again = answer([*first, said, user(f"again {random.Random(int(os.environ['LMGYM_SEED'])).randint(0, 9)}")])
    return sum(character.isdigit() for character in said["content"] + again["content"]) / 4


def branches(task: dict[str, Any]) -> float:
    """Forks, an edited past, a retry, several choices, a stream, a sub-agent with tools."""
    first = [{"role": "system", "content": "s<eos>"}, user("a")]
    one = answer(first)
    second = answer([*first, one, user("b")])  # turn 1: goes on
    two = answer([*first, one, user("c")])  # turn 2: a branch behind turn 0
    answer([*first, one, user("c"), two, user("d")])  # turn 3: goes on behind it
    answer([*first, one, user("b"), second, user("e")])  # turn 4: back to turn 1
    answer([*first, one, user("b"), second, user("e")])  # turn 5: the same again
    answer([*first, {"role": "assistant", "content": "no!"}, user("f")])  # turn 6: a past that never was
    both = ask([*first, one, user("g")], n=2)["choices"]  # turns 7, 8
    answer([*first, one, user("g"), both[1]["message"], user("h")])  # turn 9: behind turn 8
    pieces = ask([user("i")], stream=True, stop=["q", "z"])  # turn 10
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    answer([user("i"), {"role": "assistant", "content": text}, user("j")])  # turn 11
    answer([user("k")], tools=[ADD])  # turn 12
    return 1.0


def tools(task: dict[str, Any]) -> float:
    """A call, whose arguments are written anew, its result, and a text that only looks like a call."""
    asked = [user("add")]
    choice = ask(asked, tools=[ADD], tool_choice="auto")["choices"][0]
    [call] = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    assert (call["function"]["name"], arguments) == ("add", {"a": [2], "b": 1})
    call["function"]["arguments"] = json.dumps(arguments, indent=1, sort_keys=True)
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    asked += [said, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}]
    again = answer(asked, tools=[ADD])
    assert again["content"] == "<tool_call>{no</tool_call>" and "tool_calls" not in again
    answer([*asked, again, user("what?")], tools=[ADD])
    return 1.0


def greets(task: dict[str, Any]) -> float:
    """It begins with an answer that it has not asked for."""
    answer([{"role": "assistant", "content": "Hello."}, user(task["prompt"])])
    return 1.0


def looks(task: dict[str, Any]) -> float:
    """It shows the picture of its example, in one form of a request, then one that a tool has drawn, in the other."""
    [own] = task["pictures"]
    image = {"type": "image_url", "image_url": {"url": own, "detail": "low"}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "See "}, image, {"type": "text", "text": "?"}]}]
    said = answer(asked)
    block = {"type": "image_url", "image_url": {"url": task["meta"]["drawn"]}}
    answer([*asked, said, {"role": "user", "content": [block, {"type": "text", "text": "And <image>?"}]}])
    other = {"role": "user", "content": [{"type": "text", "text": "See "}, block, {"type": "text", "text": "?"}]}
    answer([other, said, user("Now?")])  # the same words about another picture: another past
    for url, why in (("https://example.com/a.png", "nothing is fetched"), ("data:image/png;base64,AAAA", "be read")):
        wrong = {"type": "image_url", "image_url": {"url": url}}
        try:
            ask([{"role": "user", "content": [wrong]}])
        except urllib.error.HTTPError as error:
            assert error.code == 400 and why in json.loads(error.read())["error"]["message"]
            continue
        raise AssertionError(url)
    return 1.0


def wanders(task: dict[str, Any]) -> float:
    """A conversation that depends on the answers: it goes on, or back to some earlier place. It waits at random."""
    messages, earlier, length = [user(task["prompt"])], [[user(task["prompt"])]], 0
    for number in range(5):
        time.sleep(random.SystemRandom().random() / 20)
        said = answer(messages)
        length += len(said["content"])
        if length % 3 == 0:
            messages = [*earlier[length % len(earlier)], user(f"{number}")]
        else:
            messages = [*messages, said, user(f"go {number}")]
        earlier.append(messages)
    return length % 7 / 7


def chaos(task: dict[str, Any]) -> float:
    """Many requests, good ones and garbage, some of which are given up at once. Each good reply names its session."""
    draw, tag = random.Random(int(os.environ["LMGYM_SEED"])), task["prompt"]
    host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    path = "/" + os.environ["OPENAI_BASE_URL"].split("/", 3)[3] + "/chat/completions"
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    paths = [[user(tag)]]
    for _ in range(12):
        kind, messages = (
            draw.choice(["good", "good", "good", "gone", "bytes", "shape", "deep", "cut"]),
            draw.choice(paths),
        )
        body = json.dumps({"messages": [*messages, user(f"{tag} <eos> {draw.random()}")]}).encode()
        connection = http.client.HTTPConnection(host, int(port))
        if kind == "good":
            said = answer(messages)
            assert said["content"].startswith(f"[{tag}]"), (said, tag)
            paths.append([*messages, said, user(draw.choice(["", "<|im_end|>", "\x00", "\U0001f600", tag]))])
        elif kind == "gone":
            connection.request("POST", path, body, key)
            connection.close()
        elif kind == "cut":
            connection.putrequest("POST", path)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[: draw.randrange(len(body))])
            connection.close()
        else:
            odd = {"bytes": draw.randbytes(200), "shape": json.dumps({"messages": draw.random()}).encode()}
            connection.request("POST", path, odd.get(kind, b"[" * 50_000), key)
            assert connection.getresponse().status == 400
            connection.close()
    answer([user(tag)])
    return 1.0


def logprobs(task: dict[str, Any]) -> float:
    """Tokens with their log-probabilities, of a reply and of a stream; none where none are wanted."""
    first = ask([user("a")], logprobs=True)["choices"][0]
    [piece, _] = ask([user("b")], logprobs=True, stream=True, n=1)
    assert ask([user("c")])["choices"][0]["logprobs"] is None
    seen = [first["logprobs"]["content"], piece["choices"][0]["logprobs"]["content"]]
    assert first["message"]["content"] == "".join(token["token"] for token in seen[0])
    Path(task["meta"]["note"]).write_text(json.dumps([[[own["token"], own["logprob"]] for own in one] for one in seen]))
    return 1.0


def misuses(task: dict[str, Any]) -> float:
    """Requests that are refused, each with its status; then a good one."""
    other, wrong = os.environ["OPENAI_BASE_URL"], {"Authorization": "Bearer no"}
    odd: list[tuple[int, dict[str, Any]]] = [
        (400, {"messages": []}),
        (400, {"messages": [user("a")], "temperature": 0.5}),
        (400, {"messages": [user("a")], "response_format": {"type": "json_object"}}),
        (400, {"messages": [user("a")], "logprobs": 1}),
        (400, {"messages": [user("a")], "logprobs": True, "top_logprobs": 3}),
        (400, {"messages": [user("a")], "best_of": 2}),
        (400, {"messages": [user("a")], "n": 0}),
        (400, {"messages": [user("a")], "seed": 0.5}),
        (400, {"messages": [user("a")], "seed": 2**63}),
        (400, {"messages": [user("a"), {"role": "assistant", "content": "b"}]}),
        (400, {"messages": [user("\ud800")]}),
        (400, {"messages": [{"role": "god", "content": "a"}]}),
        (400, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (413, {"messages": [user("a" * 1_000_001)]}),
        (403, {"messages": [user("a")], "headers": {"Origin": "http://evil.example"}}),
        (403, {"messages": [user("a")], "headers": {"Host": "evil.example"}}),
        (401, {"messages": [user("a")], "headers": wrong}),
        (411, {"messages": [user("a")], "headers": {"Transfer-Encoding": "chunked"}}),
    ]
    seen = []
    for _, request in odd:
        try:
            ask(**request)
            seen.append(200)
        except urllib.error.HTTPError as error:
            seen.append(error.code)
            assert json.loads(error.read())["error"]["message"]
    os.environ["OPENAI_BASE_URL"] = other.replace("/v1", "0/v1")
    try:
        ask([user("a")])
    except urllib.error.HTTPError as error:
        assert error.code == 401
    os.environ["OPENAI_BASE_URL"] = other
    answer([user("a")])
    assert seen == [status for status, _ in odd], seen
    return 1.0


def refused(task: dict[str, Any]) -> float:
    """Is refused between two answers."""
    first = answer([user("a")])
    try:
        ask([user("a")], temperature=2)
    except urllib.error.HTTPError as error:
        assert error.code == 400
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    foreign = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        ask([user("a"), foreign, {"role": "tool", "tool_call_id": "x", "content": "3"}])
    except urllib.error.HTTPError as error:
        assert error.code == 400
    answer([user("a"), first, user("b")])
    return 1.0


def tells_the_time(task: dict[str, Any]) -> float:
    """Asks something else each time."""
    answer([user(str(time.monotonic_ns()))])
    return 1.0


def seeds(task: dict[str, Any]) -> float:
    """With a seed of their own, equal requests get equal answers, whatever was asked between them; choices differ."""
    asked = [user("a")]
    first = answer(asked, seed=5)
    other, free, again = answer(asked, seed=-6), answer(asked), answer(asked, seed=5)
    both = ask([user("b")], seed=5, n=2)["choices"]
    assert first == again and len({one["content"] for one in (first, other, free)}) == 3
    assert both[0]["message"] != both[1]["message"] and ask([user("b")], seed=5)["choices"][0] == both[0]
    return 1.0


def together(task: dict[str, Any]) -> float:
    """Three requests at the same time."""
    found: list[Any] = []
    asking = [threading.Thread(target=lambda n=n: found.append(answer([user(str(n))]))) for n in range(3)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    return float(len(found))


def leaves_something(task: dict[str, Any]) -> float:
    """A process that outlives its parent's group, and a file in the folder. Both are noted in `meta`'s file."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    Path("left.txt").write_text("left")
    Path(task["meta"]["note"]).write_text(json.dumps([left.pid, os.getcwd()]))
    answer([user("a")])
    return 0.5


def endless(task: dict[str, Any]) -> float:
    messages = [user("a")]
    while True:
        messages += [answer(messages), user("b")]


def silent(task: dict[str, Any]) -> float:
    return 1.0


def failing(task: dict[str, Any]) -> float:
    answer([user("a")])
    raise ValueError("no such thing")


def hanging(task: dict[str, Any]) -> float:
    answer([user("a")])
    threading.Event().wait()
    return 1.0


def writing(task: dict[str, Any]) -> float:
    answer([user("a")])
    while True:
        print("a" * 100_000)


def speechless(task: dict[str, Any]) -> float:
    answer([user("a")])
    os._exit(0)


async def waits_for_itself(task: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"reward": 0.5, "said": answer([user("a")])["content"]}


IMPORTED_BY = os.getpid()


def tells_who_imported_it(task: dict[str, Any]) -> float:
    answer([user("a")])
    return float(IMPORTED_BY)


def sleeps(task: dict[str, Any]) -> None:
    """Notes itself and its keeper."""
    Path(task["note"] + ".new").write_text(json.dumps([os.getpid(), os.getppid()]))
    os.rename(task["note"] + ".new", task["note"])
    time.sleep(1000)


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    print("a line before")
    print(json.dumps({"reward": globals()[sys.argv[1]](task)}))
