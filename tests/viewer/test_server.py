"""The server answers the page of the user who started it, and nobody else; notes and searches go through it."""

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.core.files import HIDDEN
from lmgym.logs.rewind import rewind
from lmgym.viewer import server
from lmgym.viewer.guard import TOKEN, Guard
from lmgym.viewer.notes import NOTES, read_notes
from lmgym.viewer.runs import RunRecords, open_runs
from lmgym.viewer.search import Search, matching
from lmgym.viewer.server import application, bound, serve, server_of
from tests.viewer.sample_runs import ANSWERS, append, sample_run

PORT = 8642
OWN = {"host": f"127.0.0.1:{PORT}"}


class Client:
    """Sends requests to an ASGI application in this process."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.token = {TOKEN: guard.token}

    def ask(
        self, path: str, headers: dict[str, str], method: str = "GET", body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        asyncio.run(self.guard(scope, receive, send))
        start, *rest = sent
        answered = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], answered, b"".join(part.get("body", b"") for part in rest)

    def get(self, path: str) -> Any:
        return json.loads(self.ask(path, OWN | self.token)[2])

    def post(self, path: str, tree: Any) -> tuple[int, Any]:
        origin = {"origin": f"http://127.0.0.1:{PORT}"}
        status, _, body = self.ask(path, OWN | self.token | origin, "POST", json.dumps(tree).encode())
        return status, json.loads(body)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    return open_runs([sample_run(tmp_path_factory.mktemp("runs") / "sample")])[0]


@pytest.fixture(scope="module")
def client(run: RunRecords) -> Client:
    pytest.importorskip("starlette", reason="needs lmgym[view]")
    return Client(Guard(application([run]), PORT))


def test_the_page_has_no_secret_and_its_address_is_one_that_browsers_send_to_no_server(client: Client) -> None:
    assert client.guard.address == f"http://127.0.0.1:{PORT}/#token={client.guard.token}"
    for headers in (OWN, OWN | {"sec-fetch-site": "cross-site"}):  # as from the file that --open writes
        status, answered, page = client.ask("/", headers)
        assert status == 200 and page.startswith(b"<!doctype html>") and client.guard.token.encode() not in page
    # A cookie would go to all ports of this machine.
    assert "set-cookie" not in answered | client.ask("/data/runs", OWN | client.token)[1]
    policy = answered["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answered["cache-control"] == "no-store" and answered["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "headers", "known"),
    [
        ("/data/runs", OWN, False),
        ("/data/runs", OWN | {TOKEN: "wrong"}, False),
        ("/data/runs", OWN | {TOKEN: ""}, False),
        ("/data/runs?token={token}", OWN, False),
        ("/data/runs", OWN | {"cookie": "x-lmgym-token={token}"}, False),
        ("/page/../data/runs", OWN, False),
        ("/", {"host": "evil.example:8642"}, True),
        ("/", {"host": "127.0.0.1.evil.example"}, True),
        ("/", {}, True),
        ("/data/runs", OWN | {"origin": "http://evil.example"}, True),
        ("/data/runs", OWN | {"origin": "http://127.0.0.1:9999"}, True),
        ("/data/runs", OWN | {"origin": "null"}, True),
        ("/data/runs", OWN | {"origin": "http://["}, True),
        ("/data/runs", OWN | {"origin": "http://127.0.0.1:8642\u2100"}, True),
        ("/data/runs", OWN | {"sec-fetch-site": "cross-site"}, True),
    ],
)
def test_requests_of_others_are_refused(client: Client, path: str, headers: dict[str, str], known: bool) -> None:
    path, headers = (json.loads(json.dumps(one).replace("{token}", client.guard.token)) for one in (path, headers))
    status, answered, body = client.ask(path, headers | (client.token if known else {}))
    assert (
        status == (404 if path.startswith("/page/") else 403) and b"sample" not in body and "set-cookie" not in answered
    )
    assert "default-src 'none'" in answered["content-security-policy"]


def test_a_change_needs_an_origin(client: Client) -> None:
    assert client.ask("/data/searches", OWN | client.token, "POST", b"{}")[0] == 403


@pytest.mark.parametrize("name", ["../server.py", "%2e%2e/server.py", "nothing.js", "style.css/.."])
def test_only_files_of_the_page_are_served(client: Client, name: str) -> None:
    assert client.ask(f"/page/{name}", OWN | client.token)[0] == 404


def test_what_cannot_be_shown_is_one_sentence(client: Client) -> None:
    assert client.get("/data/runs/7/curves") == {"error": "there is no run 7; there are 1, counted from 0"}
    assert "has no answers" in client.get("/data/runs/0/steps/0/99")["error"]
    _, tree = client.post("/data/searches", {"run": 0, "pattern": "("})
    assert tree["error"].startswith("'(' is no regular expression")
    assert client.post("/data/runs/0/notes", {})[0] == 400 and client.post("/data/runs/0/notes", [])[0] == 400
    status, tree = client.post("/data/runs/0/notes", {"answer": "train/0/5/0", "note": "a" * 200_000, "tags": []})
    assert status == 400 and "at most" in tree["error"]


def test_records_that_make_no_sense_are_one_sentence_too(client: Client, tmp_path: Path) -> None:
    folder = sample_run(tmp_path / "odd", steps=1)
    append(folder / "rollouts.jsonl", {"kind": "train", "stage": 0, "stage_name": "rl", "step": 7, "turns": 3})
    odd = Client(Guard(application(open_runs([folder])), PORT))
    said = odd.get("/data/runs/0/steps/0/7")["error"]
    assert said.endswith("rollouts.jsonl: 1 of the train records of stage 1, step 8 cannot be made sense of")
    assert "columns" in odd.get("/data/runs/0/steps/0/0")


def test_a_note_is_kept_replaced_and_removed_and_nothing_else_is_written(client: Client, run: RunRecords) -> None:
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    note = {"answer": "train/0/5/0", "note": "guesses\u2028<b>", "tags": ["good", " ", "short"]}
    client.post("/data/runs/0/notes", {**note, "answer": "train/0/5/1"})
    client.post("/data/runs/0/notes", note)
    _, notes = client.post("/data/runs/0/notes", note | {"note": "right"})
    assert [one["index"] for one in notes] == [1, 0]
    assert notes[1] | {"time": 0} == {
        "kind": "train", "stage": 0, "step": 5, "split": None, "index": 0, "example": "sums/0",
        "prompt": "What is 20 + 22, asked for the 1. time?", "answer": ANSWERS[0], "score": 1.0, "note": "right",
        "tags": ["good", "short"], "time": 0,
    }  # fmt: skip
    assert client.get("/data/runs/0/notes") == read_notes(run.folder) == notes
    for index in (0, 1):
        client.post("/data/runs/0/notes", {"answer": f"train/0/5/{index}", "note": "", "tags": []})
    assert (run.folder / NOTES).read_bytes() == b""
    (run.folder / NOTES).unlink()
    assert before == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def test_a_note_is_kept_while_the_run_resumes(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes all files that a kill may have left half written, also the one that is being written."""
    folder = sample_run(tmp_path / "resumed", steps=1)
    own, usual = Client(Guard(application(open_runs([folder])), PORT)), os.replace

    def replace(one: Path, other: Path) -> None:
        monkeypatch.undo()
        rewind(folder, 0, 1)
        usual(one, other)

    monkeypatch.setattr(os, "replace", replace)
    status, notes = own.post("/data/runs/0/notes", {"answer": "train/0/0/0", "note": "right", "tags": []})
    assert status == 200 and [one["note"] for one in notes] == ["right"]
    assert read_notes(folder) == notes and not [*folder.glob(f"{HIDDEN}*")]


def test_filters_select_answers_by_their_numbers() -> None:
    columns = {
        "index": [0, 1, 2, 3], "group": [0, 1, 2, 2], "score": [1.0, None, 0.0, 0.0], "error": ["", "broken", "", ""],
        "truncated": [False, True, False, True], "reason": ["", "", "", ""],
        "reward_components": {"a": [1, None, 3, 4]},
    }  # fmt: skip

    def rows(*filters: tuple[str, str, float]) -> list[int]:
        return np.flatnonzero(matching(columns, filters)).tolist()

    assert rows() == [0, 1, 2, 3] and rows(("score", "<=", 0.5)) == [2, 3] and rows(("error", "=", 1)) == [1]
    assert rows(("equal", "=", 1), ("truncated", "=", 0)) == [2] and rows(("reward/a", "!=", 3)) == [0, 3]
    assert rows(("spread", ">", 0)) == [] and rows(("reward/b", "=", 0)) == []
    with pytest.raises(LmgymError, match="no number 'scroe'"):
        rows(("scroe", "=", 1))
    with pytest.raises(LmgymError, match="'reason' is no number"):
        rows(("reason", "=", 1))
    with pytest.raises(LmgymError, match="operator '~'"):
        rows(("score", "~", 1))


def finished(search: Search, seconds: float = 60) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while not search.done and time.monotonic() < end:
        time.sleep(0.02)
    return search.tree()


@pytest.mark.slow
@pytest.mark.processes
def test_a_search_finds_texts_by_an_expression_and_ends_one_that_never_would(
    run: RunRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = finished(Search(run, r"is (\d+)\.", [("score", "=", 1.0)], seconds=50))
    assert tree["done"] and tree["searched"] == tree["steps"] == 12 and tree["sentence"] == ""
    assert {(one["step"], one["index"]) for one in tree["found"]} == {(s, i) for s in range(12) for i in (0, 10)}
    assert tree["found"][0]["step"] == 11 and tree["found"][0]["found"][1] == "is 42."
    # 2^40 ways to fail; and a search that was cancelled at once.
    monkeypatch.setattr("lmgym.viewer.search.STEP_SECONDS", 0.2)
    slow = sample_run(tmp_path / "slow", steps=1, texts=["a" * 40 + "b"])
    tree = finished(Search(RunRecords(slow, "slow"), "(a+)+$", [], seconds=50))
    assert tree["found"] == [] and "a step was left out" in tree["sentence"]
    search = Search(run, "x", [], seconds=50)
    search.cancel()
    tree = finished(search)
    assert tree["searched"] < 12 and tree["sentence"].startswith("cancelled after")


def test_a_search_ends_whatever_the_records_hold(run: RunRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the page would ask for ever."""
    monkeypatch.setattr("lmgym.viewer.search._jobs", lambda *asked: {}["span"])
    tree = finished(Search(run, "x", [], seconds=50))
    assert tree["done"] and tree["sentence"] == "the search ended: KeyError: 'span'"


def test_two_tabs_may_end_the_same_search(run: RunRecords) -> None:
    class Shared(dict[str, Any]):
        def pop(self, key: str, *default: Any) -> Any:
            super().pop(key, None)  # the other tab is faster
            return super().pop(key, *default)

    asked = server.Asked([run])
    for name in ("searches", "questions"):
        setattr(asked, name, Shared({str(number): None for number in range(server.MOST_SEARCHES)}))
    key = asked.begin_search({}, {"run": 0, "pattern": "x", "seconds": 0})["key"]
    assert asked.searches[key] and len(asked.searches) == server.MOST_SEARCHES
    question = asked.begin_question({}, {"run": 0, "kind": "bisect", "stage": 0, "metric": "reward"})
    assert [*asked.questions] == [question["key"]]
    asked.end({"key": question["key"]}, {})


@pytest.mark.slow
@pytest.mark.processes
def test_a_search_follows_no_link_out_of_the_run(run: RunRecords, tmp_path: Path) -> None:
    linked = sample_run(tmp_path / "linked", steps=1, texts=["17"])
    shutil.rmtree(linked / "traces")
    (linked / "traces").symlink_to(run.folder / "traces")  # the whole folder, of somebody else
    tree = finished(Search(RunRecords(linked, "linked"), "42", [], seconds=50))
    assert tree["found"] == [] and "is a link that leads out of the run folder" in tree["sentence"]
    mixed = sample_run(tmp_path / "mixed", steps=2, texts=["17"])
    shard = next((mixed / "traces").glob("*000001*"))
    shard.unlink()
    shard.symlink_to(next((run.folder / "traces").glob("*000001*")))
    tree = finished(Search(RunRecords(mixed, "mixed"), "", [], seconds=50))
    assert {one["step"] for one in tree["found"]} == {0} and "is a link that leads out" in tree["sentence"]


def test_a_taken_port_is_replaced_and_a_missing_library_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(0) as one, bound(one.getsockname()[1]) as other:
        assert one.getsockname()[1] != other.getsockname()[1] and other.getsockname()[0] == "127.0.0.1"
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(LmgymError, match=r"pip install 'lmgym\[view\]'"):
        serve([], 0, print)


@pytest.fixture
def port(run: RunRecords) -> Iterator[int]:
    """The port of a server in a thread."""
    pytest.importorskip("uvicorn", reason="needs lmgym[view]")
    with bound(0) as listening:
        serving = server_of(Guard(application([run]), listening.getsockname()[1]))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        serving.should_exit = True
        thread.join(10)


def status_of(port: int, more: str = "") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        one.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{more}Connection: close\r\n\r\n".encode())
        return one.recv(100).split(b"\r\n")[0]


def test_connections_that_stay_silent_are_closed_and_stop_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(server, "SILENT_SECONDS", 0.3)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(8)]
        for one in silent:
            one.sendall(b"GET / HTTP/1.1\r\n")  # never a whole request
        assert status_of(port) == b"HTTP/1.1 200 OK"
        for one in silent[:4]:
            with suppress(ConnectionResetError):  # closed with bytes that nobody has read
                assert one.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        began = time.monotonic()
        assert one.recv(1) == b"" and time.monotonic() - began < 5  # said nothing at all


def test_an_upgrade_to_a_websocket_is_answered_as_any_request(port: int, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    assert status_of(port, upgrade) == b"HTTP/1.1 200 OK"
    assert "Traceback" not in caplog.text and server_of(Guard(None, port)).config.ws == "none"


def test_open_puts_the_token_into_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    seen: list[tuple[int, str]] = []

    def record(address: str) -> bool:
        path = Path(address.removeprefix("file://"))
        opened.append(address)
        seen.append((path.stat().st_mode & 0o777, path.read_text()))
        return True

    monkeypatch.setattr("webbrowser.open", record)

    class Ended:
        """A server that starts, and ends at once."""

        async def startup(self, sockets: Any = None) -> None: ...

        def run(self, sockets: Any) -> None:
            asyncio.run(self.startup(sockets))

    monkeypatch.setattr(server, "server_of", lambda guard: Ended())
    folder = sample_run(tmp_path / "run", steps=1)
    assert main(["view", str(folder), "--port", "0", "--open"]) == 0
    (mode, text), (address,) = seen[0], opened
    assert "token" not in address and mode == 0o600 and "url=http://127.0.0.1:" in text and "/#token=" in text
    assert not Path(address.removeprefix("file://")).exists()
