"""Tools of an MCP server: mcp_server.py in a process of its own, which speaks the protocol's real messages."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmgym.config.packaged import packaged_recipes
from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.core.redacted import redacted
from lmgym.envs.conversation import Conversation
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.tools import entries, mcp
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.training.checkpoints import manifest
from lmgym.training.model_card import export
from lmgym.types import Example
from tests import runs

SERVER = [sys.executable, "-S", str(Path(__file__).parent / "mcp_server.py")]
QUESTION = Example("sum/0", "What is 12 + 34?")


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    yield
    mcp._close_all()
    entries._shared.clear()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def conversation(**keys: Any) -> Conversation:
    env = Conversation(tools=[{"mcp": SERVER, **keys}], max_turns=20)
    env.reset(QUESTION, seed=0)
    return env


def answer(env: Conversation, text: str) -> str:
    return env.step(text, "eos").messages[0]["content"]


def test_the_model_reads_the_schemas_and_gets_results() -> None:
    env = Conversation(tools=["calculator", {"mcp": SERVER}], tool_prompt="template")
    env.reset(QUESTION, seed=0)
    names = [tool["function"]["name"] for tool in env.template["tools"]]
    assert names == ["calculator", "add", "count", "mischief"]  # of all three pages of its list
    add = env.template["tools"][1]["function"]
    assert add["description"] == "Adds two numbers." and add["parameters"]["required"] == ["a", "b"]
    assert answer(env, call("add", a=12, b=34)) == "46"
    assert answer(env, call("calculator", expression="2*3")) == "6"
    env.close()


def test_wrong_calls_and_failed_calls_are_told_apart() -> None:
    env = conversation()
    missing = env.step(call("add", a=1), "eos")
    assert missing.info == {"calls": 1, "invalid_calls": 1, "tool_errors": 0}
    assert json.loads(missing.messages[0]["content"]) == {"error": "add needs the argument 'b'"}
    failed = env.step(call("add", a=1, b="x"), "eos")  # types are the server's business
    assert failed.info == {"calls": 1, "invalid_calls": 0, "tool_errors": 1}
    assert json.loads(failed.messages[0]["content"]) == {"error": "ToolError: a and b must be whole numbers"}
    env.close()


def test_other_content_than_text_is_named() -> None:
    env = conversation()
    assert answer(env, call("mischief", kind="picture")) == "[image image/png]\nin the file"
    assert json.loads(answer(env, call("mischief", kind="ask"))) == {
        "jsonrpc": "2.0",
        "id": "from-the-server",
        "result": {},
    }
    env.close()


def test_each_episode_has_a_server_of_its_own_unless_shared() -> None:
    def counts(**keys: Any) -> list[str]:
        first, second = conversation(**keys), conversation(**keys)
        seen = [answer(env, call("count")) for env in (first, first, second)]
        first.close()
        second.close()
        return seen

    assert counts() == ['{"count": 1}', '{"count": 2}', '{"count": 1}']
    assert not mcp._running  # they end with their episodes
    assert counts(shared=True) == ['{"count": 1}', '{"count": 2}', '{"count": 3}']
    assert len(mcp._running) == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sleep", r"did not answer within 0\.5 s \(in a call of mischief\)"),
        ("die", "ended with exit status 3: Traceback: the disk is full"),
        ("bare", "answered a call with a content that is no list of parts"),
        ("strings", "answered a call with a content that is no list of parts"),
        ("chatter", "wrote to its output what is no message of the protocol: b'INFO: called'"),
    ],
)
def test_a_server_that_is_lost_costs_the_episode(kind: str, reason: str) -> None:
    envs = InProcess(lambda: Conversation(tools=[{"mcp": SERVER, "seconds": 0.5 if kind == "sleep" else 20}]))
    envs.begin([(0, QUESTION, 0), (1, QUESTION, 1)])
    lost, other = envs.step([(0, call("mischief", kind=kind), "eos"), (1, call("add", a=1, b=2), "eos")])
    assert isinstance(lost, EnvFailure)
    assert re.search(rf"ToolLost: the MCP server '.*' {reason}", lost.message)
    assert other.messages[0]["content"] == "3"
    envs.close()
    assert not mcp._running


@pytest.mark.processes
def test_it_works_in_worker_processes() -> None:
    envs = EnvProcesses("conversation", {"tools": [{"mcp": SERVER}]}, count=1)
    (opening,) = envs.begin([(0, QUESTION, 0)])
    assert isinstance(opening, Opening) and '"add"' in opening.prompt[0]["content"]  # type: ignore[index]
    (step,) = envs.step([(0, call("add", a=2, b=2), "eos")])
    assert step.messages[0]["content"] == "4"
    envs.end([0])
    envs.close()


def test_the_server_sees_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PRIVATE_KEY", "secret")
    monkeypatch.setenv("GIVEN", "1")
    env = conversation(variables=["GIVEN"])
    answer(env, call("add", a=1, b=1))
    (session,) = mcp._running
    if os.path.exists("/proc/self/environ"):
        seen = Path(f"/proc/{session._process.pid}/environ").read_text()  # type: ignore[union-attr]
        assert "A_PRIVATE_KEY" not in seen and "GIVEN=1" in seen and "PATH=" in seen
    env.close()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"mcp": ["no-such-program"]}, "the MCP server 'no-such-program' cannot be started: No such file"),
        ({"mcp": [*SERVER, "--old"]}, "speaks version '2020-01-01' of the protocol; lmgym speaks 2024-11-05"),
        ({"mcp": [*SERVER, "--list", "null"]}, "answers tools/list without a list of tools"),
        ({"mcp": [*SERVER, "--list", "text"]}, "answers tools/list without a list of tools"),
        ({"mcp": [*SERVER, "--list", "none"]}, "answers tools/list without a list of tools"),
        ({"mcp": [*SERVER, "--list", "array"]}, "answered tools/list with neither a result nor an error"),
        ({"mcp": [*SERVER, "--list", "number"]}, "lists a tool without a name"),
        ({"mcp": [*SERVER, "--list", "schema"]}, "gives its tool 'add' an inputSchema that is no object"),
        ({"mcp": [*SERVER, "--list", "properties"]}, "gives its tool 'add' properties that are no object"),
        ({"mcp": [*SERVER, "--list", "required"]}, "gives its tool 'add' a 'required' that is no list of names"),
        ({"mcp": [*SERVER, "--list", "description"]}, "describes its tool 'add' by what is no text"),
        ({"mcp": [*SERVER, "--list", "deep"]}, "wrote to its output what is no message of the protocol"),
        pytest.param(
            {"mcp": [*SERVER, "--list", "slow"], "seconds": 1},
            "did not end its list of tools within 5 s",
            marks=pytest.mark.slow,
        ),
        ({"mcp": SERVER, "only": ["ad"]}, "has no tool 'ad'; did you mean 'add'"),
        ({"mcp": []}, "mcp is empty; write the program and its arguments"),
        ({"mcp": SERVER, "secs": 3}, r"unknown key 'env\.tools\.0\.secs'"),
        ({"mcp": SERVER, "variables": {"KEY": "sk-secret"}}, r"has no values: .* write variables: \[KEY\] and set KEY"),
        ({"mcp": SERVER, "variables": ["NOT_SET"]}, "no environment variable NOT_SET is set"),
        ({"mcp": [*SERVER, "--api-key=abc"]}, r"a secret among the arguments \(--api-key=\(redacted [0-9a-f]{4}\)\)"),
        ({"mcp": [*SERVER, "--api-key", "abc"]}, "a secret among .* name it in variables"),
        ({"mcp": [*SERVER, "sk-0123456789abcdef0123"]}, "a secret among .* name it in variables"),
        ({"mcp": SERVER, "seconds": 0}, r"seconds is 0(\.0)?; it must be above 0"),
        ({"shared": True}, r"key 'env\.tools\.0\.mcp' is missing"),
    ],
)
def test_mistakes_are_named(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence) as refused:
        Conversation(tools=[entry])
    assert "sk-secret" not in str(refused.value)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(LmgymError, match="two tools are called 'add'"):
        Conversation(tools=[{"mcp": SERVER}, {"mcp": SERVER, "shared": True}])
    env = Conversation(tools=[{"mcp": SERVER, "only": ["add"]}, {"mcp": SERVER, "only": ["count"]}])
    assert list(env._tools) == ["add", "count"]


@pytest.mark.slow
def test_no_key_is_written_or_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a variable holds, also where a shell makes an argument of it; a run of an older version goes on."""
    monkeypatch.setenv("SEARCH_API_KEY", "the-value-of-it")
    command = f'exec {shlex.join(SERVER)} --token="$SEARCH_API_KEY"'
    server = {"mcp": ["sh", "-c", command], "variables": ["SEARCH_API_KEY"]}
    env = {"name": "conversation", "tools": [server], "max_turns": 1}
    room = {"policy": {**runs.TINY["policy"], "architecture": {**runs.ARCHITECTURE, "max_position_embeddings": 1024}}}
    run = runs.run(tmp_path / "run", env=env, steps=1, **room)
    export(run, tmp_path / "model")
    for path in [path for folder in (run, tmp_path / "model") for path in folder.rglob("*") if path.is_file()]:
        assert b"the-value-of-it" not in path.read_bytes()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "$SEARCH_API_KEY" in card and "- SEARCH_API_KEY" in card

    saved = runs.newest(run)  # as older versions wrote it
    tree = json.loads((saved / "fingerprint.json").read_text())
    [stage] = tree["recipe"]["stages"]
    stage["env"]["tools"] = [{**server, "variables": {"SEARCH_API_KEY": "an-old-value"}}]
    (saved / "fingerprint.json").write_text(json.dumps(tree))
    (saved / "manifest.json").unlink()
    manifest.write(saved)
    runs.run(run, env=env, steps=2, **room)
    assert not [record for record in runs.records(run / "metrics.jsonl") if record["kind"] == "resume"]
    with pytest.raises(LmgymError, match=r"resume|tools was"):
        runs.run(run, env={**env, "tools": [{**server, "mcp": [*SERVER, "another"]}]}, steps=3, **room)


@pytest.mark.parametrize("where", ["env", "evaluation"])
def test_a_key_among_the_arguments_is_in_no_file(where: str, tmp_path: Path) -> None:
    env = {"name": "conversation", "tools": [{"mcp": [*SERVER, "--token=abc"]}], "max_turns": 1}
    changes: dict[str, Any] = (
        {"env": env} if where == "env" else {"evaluation": {"every": 0, "examples": 2, "env": env}}
    )
    with pytest.raises(LmgymError, match="mcp has a secret among the arguments"):
        runs.run(tmp_path / "run", steps=1, **changes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"--token=abc" in path.read_bytes()]


@pytest.mark.parametrize(
    "tree",
    [
        {"api_key": "x"}, {"access_token": "x"}, {"SEARCH_KEY": "x"}, {"password": "x"}, {"client_secret": "x"},
        {"mcp": ["server", "--api-key", "x"]}, {"mcp": ["server", "--token=x"]}, ["hf_" + "x" * 20], "sk-" + "x" * 20,
        "https://me:x@host/v1", {"deep": [{"headers": {"Authorization": "x"}}]}, {"headers": ["Bearer x"]},
    ],
)  # fmt: skip
def test_what_is_a_secret_is_redacted(tree: Any) -> None:
    hidden = redacted(tree)
    assert not re.search(r"x\b", json.dumps(hidden)) and "(redacted " in json.dumps(hidden)
    assert redacted(hidden) == hidden
    assert redacted(json.loads(json.dumps(tree).replace("x", "y"))) != hidden  # a resume sees that it has changed


def test_what_is_no_secret_stays() -> None:
    recipe = {
        "key_variable": "JUDGE_KEY", "context_start_token": 0, "stop_token": "<eos>", "prompt_key": "question",
        "max_new_tokens": 5, "api_key": None, "base_url": "http://localhost:8000/v1", "model": "sk-learn/tiny",
        "mcp": ["server", "--keys", "a"],
    }  # fmt: skip
    assert redacted(recipe) == recipe
    packaged = [read_yaml(path) for path in packaged_recipes().values()]
    assert packaged and redacted(packaged) == packaged


def test_what_a_server_writes_to_its_error_output_stays_small() -> None:
    env = conversation()
    (session,) = [one.function.args[0] for one in env._tools.values()][:1]  # type: ignore[attr-defined]
    answer(env, call("mischief", kind="noise"))
    answer(env, call("add", a=1, b=1))
    assert os.fstat(session._errors.fileno()).st_size <= mcp.LONGEST_ERRORS  # of 3 MB; below that it may grow again
    session._errors.seek(0)
    assert session._errors.read().endswith(b"the last line\n")
    env.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server notices when it reads next")
@pytest.mark.slow
def test_a_server_in_the_middle_of_a_call_ends_with_its_killed_owner(tmp_path: Path) -> None:
    program = f"""
import threading
from lmgym.envs.tools.mcp import Session
session = Session({SERVER!r}, seconds=20.0)
starting = threading.Thread(target=session.list_tools)  # a thread that ends before its server
starting.start()
starting.join()
print(session._process.pid, flush=True)
session.call("mischief", kind="sleep")
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = Path(f"/proc/{int(owner.stdout.readline())}")
    time.sleep(0.3)
    assert server.exists() and owner.poll() is None
    owner.kill()
    owner.wait()
    until = time.monotonic() + 10
    while server.exists() and "State:\tZ" not in (server / "status").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.exists() or "State:\tZ" in (server / "status").read_text()
