"""The gateway's tree of turns and its reader of requests, under random and hostile use."""

import http.client
import itertools
import json
import socket
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.envs.base import Branch, Step
from lmgym.envs.replies import reply_of, with_tools, writer
from lmgym.envs.tools.calls import Call
from lmgym.envs.tools.parsing import parse_calls, text_before_calls
from lmgym.envs.vector import InProcess
from lmgym.gateway.chat import chat_body, chat_events, read_request
from lmgym.gateway.completions import read_completion
from lmgym.gateway.messages import read_messages
from lmgym.gateway.server import LARGEST, Gateway
from lmgym.gateway.session import MOST_WAITING, Mailbox, Place, Tree, Waiting
from lmgym.gateway.wire import Answer, ChatRequest, Refused, Reply, Said, read_json
from lmgym.inference.base import Sampling
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect
from lmgym.types import Example
from tests.property.test_rendering import Script, chat, ids_of

ASKED = ChatRequest((Said("user", "2+2="),))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
words = st.sampled_from(["a", "b", "", "<|im_end|>", "<eos>", "\u00e9\U0001f600", " a\n"])


# The tree


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), words, words, st.booleans()), max_size=25))
def test_the_place_of_a_request_is_its_longest_known_beginning(choices: list[Any]) -> None:
    """Requests that go on from any earlier one, cut and edited; compared with a search through all turns."""
    tree, known, pasts = Tree(), list[tuple[Any, tuple[Said, ...]]](), [((), ())]
    for number, cut, word, reply, tools in choices:
        _, past = pasts[number % len(pasts)]
        past = past[: max(len(past) - cut, 0)]
        request = ChatRequest((*past, Said("user", word)), (TOOL,) if tools else ())
        found = tree.place(request)
        matching = [
            (len(said), turn)
            for turn, (own, said) in enumerate(known)
            if own == request.tools and len(said) < len(request.messages) and request.messages[: len(said)] == said
        ]
        covered, turn = max(matching, default=(0, None))
        assert found == Place(turn, covered)
        said = Said("assistant", reply)
        tree.record(request, said, reply + "!")
        known.append((request.tools, (*request.messages, said)))
        pasts.append(((), (*request.messages, said)))
    assert tree.count == len(known)


def test_messages_are_those_that_the_model_wrote() -> None:
    tree = Tree()
    call = Said("assistant", "", (("call_0_0", "add", '{"a": 1, "b": 2}'),))
    tree.record(ChatRequest(ASKED.messages, (TOOL,)), call, "<tool_call>{...}</tool_call>")
    again = Said("assistant", "", (("call_0_0", "add", '{"b":2,"a":1}'),))
    request = ChatRequest((*ASKED.messages, again, Said("tool", "3", call="call_0_0")), (TOOL,))
    assert tree.place(request) == Place(0, 2)
    assert tree.messages(request)[1:] == [
        {"role": "assistant", "content": "<tool_call>{...}</tool_call>"},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    with pytest.raises(Refused, match="not this session's"):
        Tree().messages(request)


def test_a_programs_own_message_stays_as_it_wrote_it() -> None:
    """Though the model has once written the same, with a stop string behind it."""
    tree = Tree()
    tree.record(ASKED, Said("assistant", "7"), "7\nEND")
    example = ChatRequest((Said("user", "1+6="), Said("assistant", "7"), *ASKED.messages))
    assert [message["content"] for message in tree.messages(example)] == ["1+6=", "7", "2+2="]


def test_calls_of_an_example_are_written_as_the_system_message_says() -> None:
    calls = (("a", "add", '{"b":2, "a":1}'), ("b", "add", "{}"))
    request = ChatRequest((Said("assistant", "So:", calls), Said("tool", "3", call="a"), *ASKED.messages), (TOOL,))
    tree = Tree()
    shown, result, _ = tree.messages(request, writer("system"))
    assert result == {"role": "tool", "content": "3", "name": "add"}
    read = parse_calls(shown["content"])
    assert [(call.name, call.arguments) for call in read if isinstance(call, Call)] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {}),
    ]
    assert text_before_calls(shown["content"]) == "So:"
    # The two tags may become control tokens. The text between them stays plain text.
    spans = [shown["content"][begin:end] for begin, end in shown["content"].spans]
    assert spans == ["<tool_call>", "</tool_call>"] * 2
    broken = ChatRequest((Said("assistant", "", (("a", "add", "{1"),)), *ASKED.messages), (TOOL,))
    with pytest.raises(Refused, match="arguments of a call of 'add' are not JSON"):
        tree.messages(broken, writer("system"))


CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TAGS = "<tool_call>\n<function=write>\n<parameter=text>\nThe first half of the sen"


@pytest.mark.parametrize("stop", ["length", "context"])
@pytest.mark.parametrize("text", [TAGS, "call:write{text:the {set}", CALLED, CALLED + '<tool_call>{"name"'])
def test_an_answer_that_was_cut_off_has_no_calls(text: str, stop: str) -> None:
    """Whether the last one is whole cannot be seen in every form; env conversation makes none of them either."""
    request = ChatRequest(ASKED.messages, (TOOL,), stop=("sen",))
    assert reply_of(text, stop, request, 0) == Reply(Said("assistant", text), "length")
    assert reply_of(text, "eos", request, 0).said.calls or text.endswith('"name"')


def test_thoughts_may_speak_of_calls() -> None:
    request = ChatRequest(ASKED.messages, (TOOL,))
    for thoughts in ("<think>maybe <tool_call>x</tool_call></think>", "<think>so</think>", ""):
        said = reply_of(f"{thoughts}Now. {CALLED}", "eos", request, 0).said
        assert said.text == f"{thoughts}Now." and [name for _, name, _ in said.calls] == ["add"]
    assert reply_of(f"<think>so</think>{CALLED[11:-12]}", "eos", request, 0).said.text == "<think>so</think>"


def test_letters_of_all_languages_are_shown_as_they_are() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "\u00e9t\u00e9"}}
    [system, _] = with_tools([{"role": "user", "content": "q"}], ChatRequest(ASKED.messages, (tool,)), "system")[0]
    assert "\u00e9t\u00e9" in system["content"]


class Wanders:
    """Goes from turn to turn of its own tree as a list of numbers says."""

    def __init__(self, moves: list[tuple[int, str]]) -> None:
        self.moves, self.tree, self.paths = iter(moves), Tree(), [ASKED.messages]

    def reset(self, example: Example, seed: int) -> Any:
        self.request = ASKED
        return self.tree.messages(ASKED)

    def step(self, text: str, stop: str) -> Step:
        self.tree.record(self.request, Said("assistant", text), text)
        self.paths.append((*self.request.messages, Said("assistant", text)))
        number, word = next(self.moves, (0, ""))
        if not word:
            return Step(terminated=True)
        self.request = ChatRequest((*self.paths[number % len(self.paths)], Said("user", word)))
        place = self.tree.place(self.request)
        return Step(self.tree.messages(self.request), branch=Branch(place.turn, place.covered))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), words.filter(bool)), max_size=10))
def test_each_row_is_its_path_and_each_turn_is_an_action_once(moves: list[tuple[int, str]]) -> None:
    """Ids of a row: the same as one would write down from the messages, with sampled answers as they were sampled."""
    texts = [f"t{number}" for number in range(len(moves) + 1)]
    # An answer that no tokenizer would write so: its ids must come back in every row behind it.
    odd = [[*ids_of("x"), *ids_of("y"), *ids_of(text), chat.eos_token_id] for text in texts]
    env = Wanders(moves)
    [episode] = collect(
        [(0, Example("a", "b"))],
        Actor(Script([odd], [chat.eos_token_id]), chat),
        Sampling(),
        (0,),
        InProcess(lambda: env),
    )
    assert not episode.error
    assert [turn.action_ids for turn in episode.turns] == odd[: len(episode.turns)]
    for row in episode.rows():
        before: list[int] = []
        for turn in row:
            before += turn.prompt_ids
            number = episode.turns.index(turn)
            text = chat.decode(before, skip_special_tokens=False).removeprefix("<bos>")
            path = env.paths[number + 1][:-1]
            parts = [f"<|im_start|>{said.role}\n{said.text}<|im_end|>\n" for said in path]
            assert text == "".join(parts) + "<|im_start|>assistant\n"
            before += turn.action_ids


# Requests


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["messages", "role", "content", "tools", "n", "stop", "stream", "tool_calls", "tool_call_id", "name", "function",
     "type", "text", "logprobs", "temperature", "stream_options", "id", "arguments", "prompt", "system", "tool_use_id",
     "input", "input_schema", "stop_sequences", "is_error", "cache_control"]
)  # fmt: skip
requests = st.dictionaries(fields, json_values | st.just([{"role": "user", "content": "a"}]), max_size=5)


@settings(max_examples=500)
@given(requests | json_values, st.dictionaries(fields, json_values, max_size=4))
def test_any_json_is_read_or_refused(tree: Any, message: dict[str, Any]) -> None:
    odd = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **message}]}
    odd["messages"].append({"role": "user", "content": "c"})
    result, use = ({"type": kind, "id": "a", "tool_use_id": "a", **message} for kind in ("tool_result", "tool_use"))
    blocks = {"messages": [{"role": "user", "content": [result]}, {"role": "assistant", "content": [use]}]}
    blocks["messages"].append({"role": "user", "content": [{"type": "text", "text": "a", **message}, result]})
    readers = (read_request, read_completion, read_messages)
    for one, read in itertools.product((tree, odd, blocks, {"prompt": "a", **message}), readers):
        try:
            request = read(one, ("temperature",))
        except Refused as refused:
            assert refused.status in (400, 413) and str(refused)
        else:
            assert request.messages[-1].role != "assistant"
            assert len(Tree().messages(ChatRequest(request.messages[-1:]))) == 1
            assert len(request.messages) == 1 or not request.bare


def anthropic(result: dict[str, Any], **tool: Any) -> ChatRequest:
    """A request with a call of a tool, a block that answers it, and the tool with more keys."""
    block = {"type": "tool_result", "tool_use_id": "a", "content": "boom", **result}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "cache_control": {"type": "ephemeral"}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}]
    tools = [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}, **tool}]
    return read_messages({"messages": [*said, {"role": "user", "content": [block]}], "tools": tools})


def test_options_of_a_stream_are_those_that_are_named() -> None:
    said = {"messages": [{"role": "user", "content": "2+2="}]}
    quiet = {"include_obfuscation": False}
    assert not read_request({**said, "stream_options": quiet}).usage
    assert read_request({**said, "stream_options": {**quiet, "include_usage": True}}).usage
    with pytest.raises(Refused, match="may hold include_usage and include_obfuscation only"):
        read_request({**said, "stream_options": {"include_cost": True}})


def test_a_failed_call_is_told_as_a_failed_one() -> None:
    assert anthropic({"is_error": True, "content": 'no "b"'}).messages[-1].text == '{"error": "no \\"b\\""}'
    for same in ({}, {"is_error": False}, {"cache_control": {"type": "ephemeral"}}):
        assert anthropic(same, strict=False).messages[-1].text == "boom"


@pytest.mark.parametrize(
    ("block", "tool", "said"),
    [
        ({"is_error": "yes"}, {}, "'is_error' must be true or false"),
        ({"odd": 1}, {}, "a block of type tool_result holds 'odd', which is not supported; leave it out"),
        ({"content": [{"type": "text", "text": "x", "odd": 1}]}, {}, "a part of type text holds 'odd'"),
        ({}, {"strict": True}, "a tool holds 'strict', which is not supported; leave it out"),
        ({}, {"input_examples": [{"a": 1}]}, "a tool holds 'input_examples'"),
    ],
)
def test_what_blocks_and_tools_ask_for_in_vain_is_refused(
    block: dict[str, Any], tool: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        anthropic(block, **tool)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[" * 100_000, b"[" * 100 + b"]" * 100, b'{"a": NaN}', b"1" * 5000, b'{"a": 1e999}' * 2],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        read_json(body)


def test_a_reply_and_its_stream_hold_the_same() -> None:
    said = Said("assistant", "Let me see.", (("call_0_0", "add", "{}"),))
    answer = Answer(0, [Reply(said, "tool_calls"), Reply(Said("assistant", "4"), "length")])
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in b"".join(chat_events(answer, ASKED, "m")).split(b"\n\n")[:-2]
    ]
    for choice in chat_body(answer, "m")["choices"]:
        pieces = [one["choices"][0] for one in events if one["choices"][0]["index"] == choice["index"]]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] and pieces[-1]["delta"] == {}
        calls = [
            {key: value for key, value in call.items() if key != "index"}
            for call in pieces[0]["delta"].get("tool_calls", [])
        ]
        assert calls == choice["message"].get("tool_calls", [])
        assert pieces[0]["delta"]["content"] == choice["message"]["content"]


# The mailbox and the server


def test_events_come_in_order_and_the_end_ends_all() -> None:
    mailbox = Mailbox[str]()
    taken, waiting = mailbox.take(), [Waiting(ASKED) for _ in range(3)]
    for one in waiting:
        mailbox.put(one)
    assert taken.result(1) is waiting[0]
    given_up = mailbox.take()
    assert given_up.result(1) is waiting[1]
    late = mailbox.take()
    assert late.result(1) is waiting[2]
    nobody = mailbox.take()
    nobody.cancel()
    mailbox.put(one := Waiting(ASKED))
    assert mailbox.take().result(1) is one  # not lost with the one who no longer waits
    mailbox.put(left := Waiting(ASKED))
    mailbox.end("over")
    assert mailbox.take().result(1) == mailbox.take().result(1) == "over"
    with pytest.raises(CancelledError):
        left.answered.result(1)
    with pytest.raises(Refused, match="over"):
        mailbox.put(Waiting(ASKED))


def test_too_many_requests_are_refused() -> None:
    mailbox = Mailbox[str]()
    for _ in range(MOST_WAITING):
        mailbox.put(Waiting(ASKED))
    with pytest.raises(Refused) as refused:
        mailbox.put(Waiting(ASKED))
    assert refused.value.status == 429


def test_sessions_share_a_server_and_nothing_else() -> None:
    """Raw requests: each session's own key, and the size of a body that does not come."""
    gateway, boxes = Gateway(), [Mailbox[str](), Mailbox[str]()]
    (one, key), (other, _) = (gateway.open(box, ()) for box in boxes)
    host, port = one.split("/")[2].split(":")

    def status(address: str, key: str, length: int | None = None, method: str = "POST", path: str = "") -> int:
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
        headers = {"Authorization": f"Bearer {key}"} | ({} if length is None else {"Content-Length": str(length)})
        connection.request(method, path or f"/{address.split('/')[3]}/v1/chat/completions", body, headers)
        found = connection.getresponse().status
        connection.close()
        return found

    assert status(other, key) == 401 and status("a/b/c/nobody", key) == 401 and status(one, "") == 401
    assert status(one, "k\u00e9y") == 401
    assert status(one, key, length=LARGEST + 1) == 413
    assert status(one, key, path="/") == 401 and status(one, key, path=f"/{one.split('/')[3]}/v1/embeddings") == 404
    assert status(one, key, method="GET") == 404 and status(one, key, method="DELETE") == 501
    asking = threading.Thread(target=lambda: found.append(status(one, key)))
    found: list[int] = []
    asking.start()
    event = boxes[0].take().result(20)
    assert isinstance(event, Waiting)
    event.answered.set_result(Answer(0, [Reply(Said("assistant", "4"), "stop")]))
    asking.join()
    # A refusal is read by a client that sends slowly, though nobody has wanted its body.
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        head = f"POST /{one.split('/')[3]}/v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: http://a\r\n"
        slow.sendall(f"{head}Content-Length: 3000000\r\n\r\n".encode())
        for _ in range(300):
            slow.sendall(b"a" * 10_000)
        assert slow.recv(100).startswith(b"HTTP/1.1 403")
    gateway.close(one)
    assert found == [200] and status(one, key) == 401
    assert not boxes[1].take().done()
