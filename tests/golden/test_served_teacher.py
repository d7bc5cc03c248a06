"""A teacher behind an endpoint: a real HTTP server that says what a tiny model finds likely, in vLLM's form."""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.algorithms.gkd import GKD
from lmgym.algorithms.requirements import ServedTeacher
from lmgym.core import endpoint as client
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import with_rest
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.logs.console import Console
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs
from tests.parity.test_resume import Interrupting
from tests.ranks import Group
from tests.runs import assert_equal_runs

HINT = "The answer is {reference}. {prompt}"
TOP_K = 7
Change = Callable[[str, int, Any], tuple[int, Any]]  # of a path, a status and what would be said


class TeacherServer:
    """Serves a model's `prompt_logprobs` as vLLM 0.32 does: the token that is there, then the K most likely ones.
    `change` may say something else instead."""

    def __init__(self, policy: Policy, change: Change = lambda path, status, said: (status, said)) -> None:
        self.policy, self.change = policy, change
        self.rows: list[tuple[int, ...]] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, {"data": [{"id": "teacher", "max_model_len": 128}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    ids = outer.policy.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
                    self.say(200, {"tokens": ids["input_ids"]})
                    return
                with outer.lock:
                    outer.keys.add(self.headers.get("Authorization"))
                    self.say(200, outer.complete(body))

            def say(self, status: int, said: Any) -> None:
                status, said = outer.change(self.path, status, said)
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def complete(self, body: dict[str, Any]) -> Any:
        ids, top_k = body["prompt"], body["prompt_logprobs"]
        assert body["model"] == "teacher" and body["max_tokens"] == 1
        if len(ids) > 2:  # else it is the trial when a run begins
            self.rows.append(tuple(ids))
        with torch.no_grad():
            said = self.policy.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        tables: list[Any] = [None]
        for token, logprobs in zip(ids[1:], said, strict=True):
            top = logprobs.topk(top_k)
            rank = int((logprobs >= logprobs[token]).sum())
            own = {token: {"logprob": logprobs[token].item(), "rank": rank, "decoded_token": "?"}}
            named = zip(top.indices.tolist(), top.values.tolist(), range(1, top_k + 1), strict=True)
            likely = {one: {"logprob": value, "rank": rank, "decoded_token": "?"} for one, value, rank in named}
            tables.append({str(one): entry for one, entry in (own | likely).items()})
        return {"choices": [{"text": "?", "prompt_logprobs": tables}]}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., TeacherServer]]:
    servers: list[TeacherServer] = []

    def start(policy: Policy, *change: Change) -> TeacherServer:
        servers.append(TeacherServer(policy, *change))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def in_fp64(seed: int, **architecture: Any) -> Policy:
    return Policy(models.in_double(models.llama(seed, **architecture)), models.tokenizer(), compute=torch.float64)


def beside(server: TeacherServer, top_k: int = TOP_K, **more: Any) -> EndpointTeacher:
    teacher = EndpointTeacher(ServedTeacher(server.address, top_k, **more), server.policy.vocabulary)
    teacher.reach(server.policy.tokenizer)
    return teacher


# What the batch holds, and the gradient


def test_it_is_asked_for_each_row_once_and_knows_what_the_model_finds_likely(
    serve: Callable[..., TeacherServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns, padding, and two rows that are equal."""
    monkeypatch.setenv("TEACHER_KEY", "sk-secret")
    server = serve(in_fp64(1))
    episodes = [*models.episodes(3), *models.episodes(3)]
    batch = models.batch_of(episodes)
    found = beside(server, key_variable="TEACHER_KEY").top_logprobs(batch)
    assert server.keys == {"Bearer sk-secret"}
    rows, columns = batch.actions.nonzero(as_tuple=True)
    assert len(server.rows) == len({*server.rows}) < len(batch)
    with torch.no_grad():
        said = server.policy.model(batch.tokens, attention_mask=batch.mask.long()).logits[rows, columns - 1]
    top = said.log_softmax(-1).topk(TOP_K)
    assert torch.equal(found.ids.long(), top.indices)  # fp64, padded or alone: no two of these are that near
    # The server computes in fp64; its numbers are stored in fp32, and what is left of 1 has their roundings together.
    expected = with_rest(top.values)
    left = float(expected[:, -1].exp().min())
    stored = rounding.rounding(1, float(top.values.abs().max()))
    assert torch.allclose(found.logprobs[:, :-1].double(), expected[:, :-1], rtol=0, atol=stored)
    assert torch.allclose(found.logprobs[:, -1].double(), expected[:, -1], rtol=0, atol=2 * stored / left)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_with_all_tokens_the_gradient_is_that_of_the_teacher_itself(
    name: Any, serve: Callable[..., TeacherServer]
) -> None:
    policy, teacher = in_fp64(0), in_fp64(1, hidden_size=24)
    policy.teacher = teacher
    batch = models.batch_of(models.episodes(4, turns=1))
    local, served = GKD(teacher="t", divergence=name), GKD(teacher="http://a/v1", divergence=name)
    both = [
        models.gradient(algorithm, policy, prepare(batch, policy, {"teacher": one}, algorithm), first=True)
        for algorithm, one in ((local, teacher), (served, beside(serve(teacher), teacher.vocabulary)))
    ]
    # The server's numbers are in single precision: each log q is wrong by eps / 2 of itself, and so is log p / q.
    near = torch.finfo(torch.float32).eps * 10
    assert models.relative(both[0][0], both[1][0]) < near
    assert both[0][1]["loss/divergence"] == pytest.approx(both[1][1]["loss/divergence"], rel=near)


def test_neither_cut_nor_path_moves_the_gradient(serve: Callable[..., TeacherServer]) -> None:
    """In fp64: all rows in one pass, row by row, layers computed again, chunks of the head, the plain padded path, a
    head with a bias of its own, more padding, and rows in another order."""
    policy, algorithm = in_fp64(0), GKD(teacher="http://a/v1", divergence="jsd")
    batch = models.batch_of(models.episodes(7, groups=2, size=3, turns=2))
    batch = prepare(batch, policy, {"teacher": beside(serve(in_fp64(1)))}, algorithm)

    class Chunked(Policy):
        head_chunk = 3

    def changed(**fields: Any) -> Policy:
        other = copy.copy(policy)
        other.__dict__ |= fields
        return other

    chunked, plainly_chunked = changed(), changed(fast=False)
    chunked.__class__ = plainly_chunked.__class__ = Chunked
    others = [changed(tokens_per_forward=1), changed(activation_checkpointing=True), changed(fast=False)]
    whole, metrics = models.gradient(algorithm, policy, batch)
    assert float(whole.norm()) > 0 and metrics["loss/divergence"] > 0
    for other in [*others, chunked, plainly_chunked]:
        found, same = models.gradient(algorithm, other, batch)
        assert models.relative(whole, found) < 1e-9
        assert same["loss/divergence"] == pytest.approx(metrics["loss/divergence"], rel=1e-9)
    order = torch.arange(len(batch) - 1, -1, -1)
    assert models.relative(whole, models.gradient(algorithm, policy, batch[order])[0]) < 1e-9


# Whole runs


def trained(folder: Path, teacher: str, *console: Any, **algorithm: Any) -> list[dict[str, Any]]:
    section = {"name": "gkd", "teacher": teacher, **algorithm}
    runs.run(folder, *console, algorithm=section, rewards=None, steps=2, checkpoint={"every": 1, "keep": 2})
    return [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]


def local_teacher() -> Policy:
    """A model of a tiny recipe's tokenizer, which finds some tokens far likelier than others."""
    teacher = load_policy(PolicySection(device="cpu"), 1)
    models.sharpen(teacher.model, 0.2)
    return teacher


@pytest.mark.parametrize("hint", [None, HINT], ids=["same prompt", "hint"])
def test_two_steps_are_those_of_a_local_teacher(
    hint: str | None, serve: Callable[..., TeacherServer], tmp_path: Path
) -> None:
    """The same model here and behind an address, of which all tokens are asked for."""
    teacher = local_teacher()
    server = serve(teacher)
    teacher.save_pretrained(tmp_path / "teacher")
    local = trained(tmp_path / "local", str(tmp_path / "teacher"), hint=hint)
    served = trained(tmp_path / "served", server.address, hint=hint, top_k=teacher.vocabulary)
    near = rounding.typical_tolerance(teacher.model)  # the mean over all tokens
    for ours, theirs in zip(local, served, strict=True):
        assert ours["loss/divergence"] == pytest.approx(theirs["loss/divergence"], abs=near)
    assert local[0]["gradient_norm"] == pytest.approx(served[0]["gradient_norm"], rel=near)
    if hint is not None:
        texts = [teacher.tokenizer.decode(row) for row in server.rows]
        assert all("The answer is" in text for text in texts)


def test_a_run_that_stops_and_goes_on_is_the_whole_run(serve: Callable[..., TeacherServer], tmp_path: Path) -> None:
    """Equal answers of the server, equal bits; few tokens are asked for."""
    server = serve(local_teacher())
    whole = trained(tmp_path / "whole", server.address, top_k=TOP_K)
    assert len(trained(tmp_path / "halves", server.address, Interrupting(at=1), top_k=TOP_K)) == 1
    assert len(trained(tmp_path / "halves", server.address, top_k=TOP_K)) == 2
    assert_equal_runs(tmp_path / "whole", tmp_path / "halves")
    assert whole[0]["loss/divergence"] > 0 and whole[0]["gradient_norm"] > 0


def test_a_server_that_has_gone_is_named_and_the_run_goes_on_later(
    serve: Callable[..., TeacherServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    most = [10**6]

    def change(path: str, status: int, said: Any) -> tuple[int, Any]:
        gone = path.endswith("completions") and len(server.rows) > most[0]
        return (503, b"loading") if gone else (status, said)

    server = serve(local_teacher(), change)
    trained(tmp_path / "run", server.address, Interrupting(at=1))
    most[0] = len(server.rows)
    with pytest.raises(LmgymError, match=r"failed 5 times; .*503 \(loading\); start it again, then resume the run"):
        trained(tmp_path / "run", server.address)
    most[0] = 10**6
    assert len(trained(tmp_path / "run", server.address)) == 2


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_ranks_share_out_the_rows(
    sharding: str,
    serve: Callable[..., TeacherServer],
    group: Group,
    tmp_path: Path,
) -> None:
    """Each row is asked for by one of them, and both then know all of them."""
    server = serve(local_teacher())
    alone = trained(tmp_path / "alone", server.address, top_k=TOP_K)
    asked = len(server.rows)
    section = {"name": "gkd", "teacher": server.address, "top_k": TOP_K}
    changes = {"distributed": {"sharding": sharding}, "algorithm": section, "rewards": None, "steps": 2}
    recipe = runs.write(tmp_path / "recipe.yaml", **changes)
    assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'both'}"]) == [0, 0], group.said() + group.said(1)
    assert len(server.rows) == 2 * asked
    both = [record for record in runs.records(tmp_path / "both/metrics.jsonl") if record["kind"] == "train"]
    near = rounding.typical_tolerance(server.policy.model)
    for ours, theirs in zip(alone, both, strict=True):
        assert ours["loss/divergence"] == pytest.approx(theirs["loss/divergence"], abs=near)


# Refusals


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"choices": []}, r"did not send prompt_logprobs as vLLM does \(IndexError"),
        ({"choices": [{"prompt_logprobs": None}]}, "did not send prompt_logprobs as vLLM does"),
        ({"choices": [{"prompt_logprobs": [None, {}]}]}, "did not send prompt_logprobs as vLLM does"),
        (b"<html>", "did not send JSON but '<html>'"),
        ("one less", rf"the ranks of the tokens are not 1 to {TOP_K}"),
        ("nan", "a log-probability is nan"),
        ("logits", r"sends numbers that are no log-probabilities .*; start it with --logprobs-mode raw_logprobs"),
        ("beyond", r"finds the token id 99999 likely, and the policy has the ids 0 to \d+ only"),
        ("another prompt", "has no log-probability"),
    ],
)
def test_an_answer_that_is_none_is_refused(what: Any, sentence: str, serve: Callable[..., TeacherServer]) -> None:
    def change(path: str, status: int, said: Any) -> tuple[int, Any]:
        if not path.endswith("completions"):
            return status, said
        if not isinstance(what, str):
            return status, what
        tables = said["choices"][0]["prompt_logprobs"]
        for table in tables[1:]:
            if what == "another prompt":
                table.pop(next(iter(table)))
                continue
            least = max(table, key=lambda name: table[name]["rank"] if table[name]["rank"] <= TOP_K else 0)
            if what == "one less":
                table[least]["rank"] += 1000
            elif what == "beyond":
                likeliest = next(name for name in table if table[name]["rank"] == 1)
                table["99999"] = {**table[likeliest]}
                table[likeliest]["rank"] = 1000
            else:
                for entry in table.values():
                    entry["logprob"] = float("nan") if what == "nan" else entry["logprob"] + 5.0
        return status, said

    with pytest.raises(LmgymError, match=rf"algorithm\.teacher: .*{sentence}"):
        beside(serve(in_fp64(1), change))


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(400, "max allowed: 5.*started with --max-logprobs 7 or more"), (404, "is there a /completions")],
)
def test_what_a_server_refuses_is_said_with_what_helps(
    status: int, sentence: str, serve: Callable[..., TeacherServer]
) -> None:
    words = {"error": {"message": "Requested prompt logprobs of 7, which is greater than max allowed: 5"}}

    def refuse(path: str, usual: int, said: Any) -> tuple[int, Any]:
        return (status, words) if path.endswith("completions") else (usual, said)

    with pytest.raises(LmgymError, match=sentence):
        beside(serve(in_fp64(1), refuse))


def listing(*names: str, length: int = 128) -> Change:
    """A server with these models."""
    models_there = {"data": [{"id": name, "max_model_len": length} for name in names]}
    return lambda path, status, said: (200, models_there) if path.endswith("models") else (status, said)


@pytest.mark.parametrize(
    ("change", "more", "sentence"),
    [
        (listing("a", "b"), {}, r"has several models, and algorithm\.teacher_model must name one .*: 'a', 'b'"),
        (listing("a"), {"model": "b"}, r"has no model 'b', and algorithm\.teacher_model must name one .*: 'a'"),
        (lambda path, status, said: (200, {"data": 3}), {}, "did not send a list of its models"),
        (lambda path, status, said: (200, {"data": [{"id": 1, "max_model_len": "x"}]}), {}, "did not send a list of"),
        (lambda path, status, said: (404, {}), {}, r"status 404 .*does its address end in /v1\?"),
        (
            lambda path, status, said: (200, {"tokens": [1, 2]} if path == "/tokenize" else said),
            {},
            "has another tokenizer than the policy",
        ),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_anything_is_loaded(
    change: Change, more: dict[str, Any], sentence: str, serve: Callable[..., TeacherServer], tmp_path: Path
) -> None:
    server = serve(local_teacher(), change)
    section = {"teacher": server.address, **({"teacher_model": more["model"]} if more else {})}
    with pytest.raises(LmgymError, match=rf"algorithm\.teacher: http://.*{sentence}"):
        runs.run(tmp_path / "run", algorithm={"name": "gkd", **section}, rewards=None, steps=1)
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"algorithm\.teacher: http://127\.0\.0\.1:9/v1 failed .*is the server"):
        runs.run(tmp_path / "run", algorithm={"name": "gkd", "teacher": "http://127.0.0.1:9/v1"}, rewards=None)
    assert not (tmp_path / "run").exists()


def test_a_server_that_cannot_tokenize_is_told_of(
    serve: Callable[..., TeacherServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(local_teacher(), lambda path, status, said: (404 if path == "/tokenize" else status, said))
    trained(tmp_path / "run", server.address, Console())
    assert "has no /tokenize beside it, so its tokenizer was not compared" in capsys.readouterr().out


def test_what_the_teacher_cannot_read_is_refused(serve: Callable[..., TeacherServer], tmp_path: Path) -> None:
    """The row itself, and the row with the hint."""
    server = serve(local_teacher(), listing("teacher", length=9))
    with pytest.raises(LmgymError, match=r"have \d+ tokens, and http.* reads 8; start it with a larger"):
        trained(tmp_path / "run", server.address)
    with pytest.raises(LmgymError, match=r"algorithm\.hint: .* has \d+ tokens, and the teacher reads 8"):
        trained(tmp_path / "hinted", server.address, hint=HINT)
    assert server.rows == []


ADDRESS = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling\.temperature is 0\.7, and a teacher behind an address"),
        ({"sampling": {"top_k": 5}}, "exclude tokens, and a teacher behind an address"),
        ({"sampling": {"min_new_tokens": 2}}, "exclude tokens, and a teacher behind an address"),
        ({"policy": {"model": "builtin:tiny_t5", "device": "cpu"}}, "builtin:tiny_t5 is an encoder-decoder"),
        ({"algorithm": {"name": "gkd", "teacher": ADDRESS, "top_k": 10_000}}, r"top_k is 10000, and the policy's voc"),
        ({"algorithm": {"name": "gkd", "teacher": "http://user@a/v1"}}, r"algorithm\.teacher is no plain address"),
        ({"algorithm": {"name": "gkd", "teacher": "builtin:tiny", "top_k": 5}}, r"top_k is for a teacher behind an"),
        ({"algorithm": {"name": "gkd", "teacher": "t", "seconds": 5}}, r"seconds is for a teacher behind an address"),
        ({"algorithm": {"name": "distill", "teacher": ADDRESS}}, "distill needs a model in the training process"),
        ({"algorithm": {"name": "gkd", "teacher": ADDRESS, "key_variable": "NO_SUCH_KEY"}}, "NO_SUCH_KEY is not set"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=sentence):
        runs.run(tmp_path / "run", **{"algorithm": {"name": "gkd", "teacher": ADDRESS}, "rewards": None, **changes})
    assert not (tmp_path / "run").exists()


def test_an_action_without_a_token_before_it_is_refused(serve: Callable[..., TeacherServer]) -> None:
    teacher, batch = beside(serve(in_fp64(1))), models.batch_of(models.episodes(3, turns=1))
    with pytest.raises(LmgymError, match="an action has no token before it"):
        teacher.top_logprobs(batch.replace(actions=torch.ones_like(batch.actions)))


def test_a_loop_of_ones_own_that_brings_no_teacher_is_told() -> None:
    policy, batch = in_fp64(0), models.batch_of(models.episodes(3, turns=1))
    with pytest.raises(LmgymError, match="`prepare` was given no teacher behind one"):
        prepare(batch, policy, {"teacher": policy}, GKD(teacher=ADDRESS))
