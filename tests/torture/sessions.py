"""Hostile sessions at the gateway: whatever programs send, each episode ends well and gets its own answers only.

    python -m tests.torture sessions       # 10,000 sessions; tests.torture.sessions 400 plays fewer

The clients are threads here, which speak HTTP by themselves; tests/contract/test_agent_program.py plays processes. A
session asks a dozen times: good requests of all forms, and garbage. What is whole gets an answer or a refusal in JSON;
what is good gets an answer that names this session. No thread ends with a traceback, and nothing hangs.
"""

import http.client
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, ClassVar
from unittest.mock import patch

from lmgym.core.errors import LmgymError
from lmgym.envs import program
from lmgym.envs.vector import InProcess
from lmgym.gateway import server
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.processes.keeper import Outcome
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect
from lmgym.text.chat import decode
from lmgym.types import Example
from tests.property.test_rendering import Script, chat, ids_of

SECONDS = 60.0  # more than this is a hang
TOGETHER = 40  # sessions in a rollout
ODD = [None, True, -1, 0, 1e308, "", "\ud800", "a" * 2000, [], {}, [[]], {"a": {}}, "tool", "assistant", ["\x00"]]
TEXTS = ["", "<|im_end|>", "<|im_start|>assistant\n", "<eos>", "\x00", "\U0001f600", "</tool_call>", "a" * 3000]
ENDS = ["", " <|im_", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{", "<function=f>"]
FORMS = ["chat/completions", "completions", "messages"]
TOOL = {"name": "f", "description": "d"}
TOOLS = {
    "chat/completions": [{"type": "function", "function": {**TOOL, "parameters": {"type": "object"}}}],
    "messages": [{**TOOL, "input_schema": {"type": "object"}}],
}


class Names(Script):
    """Answers with the session's name, which is in each prompt. `mixed` counts prompts of several sessions."""

    def __init__(self) -> None:
        super().__init__([], [chat.eos_token_id])
        self.mixed = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling, ended: Any = None) -> list[Completion]:
        found = []
        for request in requests:
            names = set(re.findall(r"session \d+", decode(chat, request.prompt_ids)))
            self.mixed += len(names) > 1
            end = ENDS[request.key % len(ENDS)]
            ids = [*ids_of(f"[{min(names, default='nobody')}]{end}"), chat.eos_token_id]
            found.append(Completion(ids, [-0.5] * len(ids), "eos"))
        return found


class Session:
    """A client in a thread, in the place of a program (keeper.Program)."""

    problems: ClassVar[list[str]]  # of all sessions

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        given: bytes,
        output: int,
        ended: Callable[[Outcome], None],
    ) -> None:
        self.name, self.key = json.loads(given)["prompt"], variables["OPENAI_API_KEY"]
        _, _, host, self.path = variables["OPENAI_BASE_URL"].split("/", 3)
        self.host, self.port = host.split(":")
        self.draw, self.pasts = random.Random(self.name), list[tuple[str, list[Any]]]()
        self.thread = threading.Thread(target=self.play, args=(ended,), daemon=True)
        self.thread.start()

    def end(self) -> None: ...

    def wait(self) -> None:
        self.thread.join(SECONDS)
        if self.thread.is_alive():
            self.problems.append(f"{self.name} hangs")

    def play(self, ended: Callable[[Outcome], None]) -> None:
        try:
            for _ in range(self.draw.randrange(12)):
                getattr(self, self.draw.choice(WAYS))()
            self.good()
        except Exception as error:
            self.problems.append(f"{self.name}: {type(error).__name__}: {error}")
        ended(Outcome(0, '{"reward": 1}', ""))

    def ask(self, form: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=SECONDS)
        key = self.draw.choice([{"Authorization": f"Bearer {self.key}"}, {"X-Api-Key": self.key}])
        connection.request("POST", f"/{self.path}/{form}", body, {**key, **(headers or {})})
        reply = connection.getresponse()
        said = reply.read()
        connection.close()
        return reply.status, said

    def refused(self, form: str, body: bytes, *expected: int, **headers: str) -> None:
        status, said = self.ask(form, body, {name.replace("_", "-"): value for name, value in headers.items()})
        if status == 200 and 200 in expected:
            return
        assert status in expected and json.loads(said)["error"]["message"], (status, said[:200])

    def request(self) -> tuple[str, dict[str, Any]]:
        """A good request, often one that goes on from an earlier answer, or from the middle of a conversation."""
        form = self.draw.choice(FORMS)
        text = f"{self.name} {self.draw.choice(TEXTS)}"
        if form == "completions":
            return form, {"prompt": text, "stream": self.draw.random() < 0.3, "n": self.draw.choice([1, 1, 2])}
        pasts = [past for own, past in self.pasts if own == form]
        past = self.draw.choice(pasts) if pasts and self.draw.random() < 0.7 else []
        asked: dict[str, Any] = {"messages": [*past, {"role": "user", "content": text}]}
        if self.draw.random() < 0.3 and not past:
            asked["tools"] = deepcopy(TOOLS[form])
        return form, {**deepcopy(asked), "stream": self.draw.random() < 0.3}

    def good(self) -> None:
        form, asked = self.request()
        status, said = self.ask(form, json.dumps(asked).encode())
        assert status == 200, (status, said[:200])
        assert f"[{self.name}]" in said.decode(), said[:500]
        if asked["stream"] or form == "completions":
            return
        reply = json.loads(said)
        message = reply["choices"][0]["message"] if form == FORMS[0] else reply
        message = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}
        if "tools" not in asked:
            self.pasts.append((form, [*asked["messages"], message]))

    def together(self) -> None:
        found = list[tuple[int, bytes]]()
        body = json.dumps({"messages": [{"role": "user", "content": self.name}]}).encode()
        asking = [threading.Thread(target=lambda: found.append(self.ask(FORMS[0], body))) for _ in range(4)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        assert [status for status, _ in found] == [200] * 4, found

    def changed(self) -> None:
        """A request with one value replaced; it may be good by chance."""
        form, asked = self.request()
        places: list[tuple[Any, Any]] = []
        level: list[Any] = [asked]
        while level:
            inside = level.pop()
            for key in inside if isinstance(inside, dict) else range(len(inside)):
                places.append((inside, key))
                if isinstance(inside[key], dict | list):
                    level.append(inside[key])
        inside, key = self.draw.choice(places)
        inside[key] = self.draw.choice(ODD)
        self.refused(form, json.dumps(asked).encode(), 200, 400)

    def garbage(self) -> None:
        bodies = [b"", self.draw.randbytes(200), b"[" * 50_000, b'{"a": NaN}', b"[" * 99 + b"]" * 99, b"9" * 9999]
        self.refused(self.draw.choice(FORMS), self.draw.choice(bodies), 400)

    def huge(self) -> None:
        text = "a" * 1_000_001
        self.refused(FORMS[0], json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), 413)
        self.refused(FORMS[1], json.dumps({"prompt": text}).encode(), 413)
        self.refused(FORMS[0], b"", 413, Content_Length=str(2**40))

    def wrong(self) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": self.name}]}).encode()
        self.refused(FORMS[0], body, 401, Authorization="Bearer k", X_Api_Key="k")
        self.refused(FORMS[0], body, 403, Origin="http://a")
        self.refused(FORMS[0], body, 403, Host="evil.example")
        self.refused(self.draw.choice(["embeddings", "../chat/completions", ""]), body, 404)
        self.refused(FORMS[0], b"", 411, Transfer_Encoding="chunked")

    def connection(self, length: int | None = None) -> tuple[http.client.HTTPConnection, bytes]:
        """A connection on which the head of a good request has been sent, and its body."""
        form, asked = self.request()
        body = json.dumps(asked).encode()
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=SECONDS)
        connection.putrequest("POST", f"/{self.path}/{form}")
        connection.putheader("Authorization", f"Bearer {self.key}")
        connection.putheader("Content-Length", str(len(body) if length is None else length))
        connection.endheaders()
        return connection, body

    def gone(self) -> None:
        """The whole request, and nobody who waits for its answer."""
        connection, body = self.connection()
        connection.send(body)
        connection.close()

    def cut(self) -> None:
        connection, body = self.connection()
        connection.send(body[: self.draw.randrange(len(body))])
        connection.close()

    def slow(self) -> None:
        connection, body = self.connection()
        for place in range(0, len(body), len(body) // 5 + 1):
            connection.send(body[place : place + len(body) // 5 + 1])
            time.sleep(0.002)
        assert connection.getresponse().status == 200
        connection.close()

    def no_http(self) -> None:
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=SECONDS)
        connection.connect()
        with suppress(OSError):
            connection.sock.sendall(
                self.draw.choice([b"\r\n\r\n", b"\x00" * 500 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
            )
            connection.sock.sendall(self.draw.randbytes(100) + b"\r\n\r\n")
            connection.sock.recv(1000)
        connection.close()


WAYS = ["good"] * 5 + ["changed"] * 3
WAYS += ["together", "garbage", "huge", "wrong", "gone", "cut", "slow", "no_http"]


def play(numbers: Iterable[int]) -> list[str]:
    """Play the sessions of these numbers; what went wrong."""
    numbers, found = list(numbers), list[str]()
    Session.problems = found

    def failed(handler: Any, request: Any, address: Any) -> None:
        if not isinstance(error := sys.exc_info()[1], OSError):
            found.append(f"the server: {type(error).__name__}: {error}")

    def died(given: threading.ExceptHookArgs) -> None:
        found.append(f"a thread: {given.exc_type.__name__}: {given.exc_value}")

    engine, before = Names(), threading.excepthook
    threading.excepthook = died
    with patch.object(program, "Program", Session), patch.object(server._Server, "handle_error", failed):
        envs = InProcess(lambda: program.AgentProgram(command=["sh"], seconds=SECONDS))
        prompts = [(place, Example(f"s/{number}", f"session {number}")) for place, number in enumerate(numbers)]
        try:
            episodes = collect(prompts, Actor(engine, chat), Sampling(), (0, "sessions"), envs)
        except LmgymError as error:
            return [*found, str(error)]
        finally:
            envs.close()
            threading.excepthook = before
    marks = [chat.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")]
    for episode in episodes:
        if episode.error or episode.score != 1.0:
            found.append(f"{episode.example.prompt}: {episode.error or episode.score}")
        for row in episode.rows():  # texts make no control tokens: as many begin as end
            ids = [id for turn in row for id in (*turn.prompt_ids, *turn.action_ids)]
            bare = marks[0] not in ids
            if not bare and ids.count(marks[0]) != ids.count(marks[1]):
                found.append(f"{episode.example.prompt}: a row with an odd mark")
    if engine.mixed:
        found.append(f"{engine.mixed} prompts with the words of another session")
    return found


def main(arguments: list[str]) -> int:
    """10,000 sessions, or as many as the first argument says."""
    count = int(arguments[0]) if arguments else 10_000
    found = list[str]()
    for begin in range(0, count, TOGETHER):
        found += play(range(begin, min(begin + TOGETHER, count)))
    print("\n".join(found[:10]) or f"{count} sessions: each ended well, with its own answers")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
