"""OpenEnv's environments: classes of its form in this process; its own server and client where they are installed."""

import json
import random
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs import openenv
from lmgym.envs.check import check_env
from lmgym.envs.openenv import OpenEnv
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.types import Example

GAMES = "tests.contract.openenv_game"
GAME = Example("game/0", "a game")


def play(env: OpenEnv, seed: int, texts: list[str]) -> list[Any]:
    return [env.reset(GAME, seed), *(env.step(text, "eos") for text in texts)]


def test_an_action_with_one_field_is_the_whole_answer() -> None:
    env = OpenEnv(environment=f"{GAMES}:Guessing", arguments={"highest": 20})
    opening = env.reset(GAME, seed=5)
    assert opening == [{"role": "user", "content": "hint: A number from 0 to 20.\nleft: 3"}]  # and no system message
    secret = random.Random(5).randint(0, 20)  # from a state of the global generator that the seed gives
    assert env.step(str(secret - 1), "eos").messages[0]["content"] == "hint: higher\nleft: 2"
    over = env.step(f'```json\n{{"number": {secret}}}\n```', "eos")
    assert over.terminated and over.reward == 1.0


def test_an_action_with_several_fields_is_json() -> None:
    env = OpenEnv(environment=f"{GAMES}:Board")
    system, _ = env.reset(GAME, seed=0)
    assert system["role"] == "system" and '"column"' in system["content"]
    step = env.step('{"row": 1, "column": 2}', "eos")
    assert step.messages[0]["content"].startswith("hint: 1 2") and step.reward == 0.5
    wrong = env.step('{"row": 1}', "eos")
    assert wrong.info == {"invalid": 1.0, "reason": "column: Field required"} and wrong.reward == -1.0
    assert env.step("go", "eos").info["reason"] == "it is not a JSON object"


@pytest.mark.parametrize(("rule", "rewards"), [("retry", [0, 0, -2]), ("penalty", [-2, -2, -2]), ("end", [-2])])
def test_invalid_answers(rule: Any, rewards: list[float]) -> None:
    env = OpenEnv(environment=f"{GAMES}:Guessing", on_invalid=rule, invalid_penalty=2)
    steps = play(env, 0, ["seven"] * len(rewards))[1:]
    assert [step.reward for step in steps] == rewards
    assert [step.terminated for step in steps] == [False] * (len(rewards) - 1) + [True]


def test_memory_and_length() -> None:
    env = OpenEnv(environment=f"{GAMES}:Board", memory="observation", max_turns=2)
    _, first, second = play(env, 0, ['{"row": 1, "column": 2}'] * 2)
    assert first.restart and [message["role"] for message in first.messages] == ["system", "user"]
    assert second.truncated and second.reward == 0.5


def test_it_keeps_the_contract_and_leaves_the_global_generator_alone() -> None:
    outside = random.getstate()
    check_env("openenv", environment=f"{GAMES}:Guessing", texts=["3", "5", "", "[1]", "\u0661", '{"number": 2}'])
    assert random.getstate() == outside


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "needs either 'env.environment'"),
        ({"environment": f"{GAMES}:Guessing", "url": "http://127.0.0.1:1"}, "needs either 'env.environment'"),
        ({"url": "http://127.0.0.1:1", "arguments": {"a": 1}}, "a server has its own"),
        ({"environment": f"{GAMES}:Gessing"}, "has no 'Gessing'; did you mean 'Guessing'"),
        ({"environment": f"{GAMES}:Guessing", "arguments": {"lowest": 1}}, "cannot be built: .*lowest"),
        ({"environment": f"{GAMES}:Untyped"}, "key 'env.action' is missing"),
        ({"environment": f"{GAMES}:Guessing", "agent": "feilds"}, "did you mean 'fields'"),
        ({"url": "http://127.0.0.1:1"}, "there is no server of OpenEnv at http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_named(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        OpenEnv(**keys).reset(GAME, 0)


def test_an_action_class_can_be_named() -> None:
    env = OpenEnv(environment=f"{GAMES}:Untyped", action=f"{GAMES}:Guess")
    assert play(env, 5, ["0"])[1].messages


def test_what_is_no_observation_costs_the_episode() -> None:
    envs = InProcess(lambda: OpenEnv(environment=f"{GAMES}:Broken"))
    envs.begin([(0, GAME, 0)])
    (failure,) = envs.step([(0, "1", "eos")])
    assert isinstance(failure, EnvFailure) and "returned str; it must return an Observation" in failure.message


class Library:
    """In place of the library's client, which is not installed everywhere: it connects to whoever has a schema."""

    def __init__(self, base_url: str) -> None: ...

    def sync(self) -> "Library":
        return self

    def connect(self) -> None: ...

    def reset(self, **arguments: Any) -> Any:
        return SimpleNamespace(observation={"hint": "begin"}, reward=None, done=False)


@pytest.mark.parametrize("reason", ["nobody listens", "an answer that is no JSON"])
def test_a_server_that_is_starting_again_is_waited_for(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed server's episodes go on when it is there again, within the waits; the first attempts fail."""
    monkeypatch.setattr(openenv, "_library", lambda: SimpleNamespace(GenericEnvClient=Library))
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    made = list[HTTPServer]()

    class Schema(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            schema = {"action": {"properties": {"number": {"type": "integer"}}, "required": ["number"]}}
            self.wfile.write(json.dumps(schema).encode() if waited[-1:] == [2] else b"starting")

        def log_message(self, *said: Any) -> None: ...

    def start() -> None:
        made.append(HTTPServer(("127.0.0.1", port), Schema))
        threading.Thread(target=made[0].serve_forever, daemon=True).start()

    waited = list[float]()

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if seconds == 2 and not made:
            start()

    monkeypatch.setattr(openenv.time, "sleep", wait)
    if reason != "nobody listens":
        start()
    try:
        opening = OpenEnv(url=f"http://127.0.0.1:{port}").reset(GAME, 0)
    finally:
        for server in made:
            server.shutdown()
            server.server_close()
    assert opening == [{"role": "user", "content": "begin"}] and waited == [0.5, 1, 2]


def test_a_server_gives_the_same_episode(tmp_path: Path) -> None:
    """The environment that `openenv init` writes, by its own server and client."""
    pytest.importorskip("openenv.core")
    import subprocess
    import urllib.request
    from time import monotonic, sleep

    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "8713"]
    server = subprocess.Popen(command, cwd=tmp_path / "echo_env")
    try:
        end = monotonic() + 90
        while monotonic() < end:
            try:
                urllib.request.urlopen("http://127.0.0.1:8713/schema").close()
                break
            except OSError:
                sleep(0.5)
        env = OpenEnv(url="http://127.0.0.1:8713")
        opening, step, wrong = play(env, 0, ["hello", '{"message": 3}'])
        assert opening[0]["content"].endswith("message_length: 0")
        assert step.messages[0]["content"] == "echoed_message: hello\nmessage_length: 5" and step.reward == 0.5
        assert wrong.info["reason"] == "it does not fit the action's fields"
        env.close()
    finally:
        server.kill()
        server.wait()
