"""vLLM as the engine, on real servers and in this process: skipped without vLLM (0.32 was tried).

LMGYM_VLLM=/path/to/venv/bin/python pytest tests/parity/test_vllm.py     servers of that environment
venv/bin/python -m pytest tests/parity/test_vllm.py -k here              with lmgym beside vLLM in one environment
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.vllm_server import served
from lmgym.algorithms.gkd import GKD
from lmgym.algorithms.requirements import ServedTeacher
from lmgym.batch import collate
from lmgym.config.build import build_config
from lmgym.core import availability, seeds
from lmgym.core.errors import LmgymError
from lmgym.functional.truncation import unpack
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.inference.served_teacher import EndpointTeacher
from lmgym.inference.vllm import here as vllm_here
from lmgym.inference.vllm import servers as vllm_servers
from lmgym.inference.vllm.engine import SPARE, VLLM, weights_of
from lmgym.inference.vllm.here import Here
from lmgym.inference.vllm.kind import lost_updates
from lmgym.inference.vllm.pictures import check_pictures
from lmgym.inference.vllm.servers import Servers, write_weights
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.vision import picture_tokens
from lmgym.types import Episode, Example, Turn
from lmgym.updates.prepare import prepare
from tests import models, rounding, runs, vision_models
from tests.parity.test_resume import Interrupting
from tests.parity.test_sampler import reported_and_scored
from tests.ranks import Group

PYTHON = os.environ.get("LMGYM_VLLM")
WITH_VLLM = pytest.mark.skipif(PYTHON is None, reason="needs LMGYM_VLLM, a Python that has vLLM")
HAS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM beside lmgym")
WHERE = [pytest.param("servers", marks=WITH_VLLM), pytest.param("here", marks=HAS_VLLM)]
CACHE = 2**28  # bytes
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
RANKS = {"policy": {"model": "builtin:tiny", "device": "cpu", "architecture": SHAPE}, "steps": 3}
PUSHES = 20
GAP = 1e-5  # nats a token, on average
SEEING_GAP = 3e-5  # likewise behind a vision tower


def policy(tied: bool = True) -> Policy:
    own = load_policy(PolicySection(device="cpu", architecture=SHAPE))
    own.model = models.sharpen(own.model, 0.2)
    if not tied:
        own.model.config.tie_word_embeddings = False
        head = torch.nn.Linear(SHAPE["hidden_size"], own.vocabulary, bias=False)
        own.model.lm_head = head
        torch.nn.init.normal_(head.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return own


@contextmanager
def server(own: Policy, folder: Path, *more: object) -> Iterator[tuple[str, subprocess.Popen]]:
    """A vLLM server of the policy's architecture: its address and process."""
    folder.mkdir(exist_ok=True)
    own.save_pretrained(folder / "model")
    with served(Path(str(PYTHON)), folder / "model", folder / "log.txt", *more) as found:
        yield found


@contextmanager
def engine_of(own: Policy, where: str, folder: Path, *more: object) -> Iterator[VLLM]:
    """vLLM on a server, or in this process."""
    if where == "here":
        engine = VLLM(own, Here(cache=CACHE))
        yield engine
        engine.close()
        return
    with server(own, folder, *more) as (address, _):
        engine = VLLM(own, Servers([address], folder / "served"))
        yield engine
        engine.close()


def asked(count: int = 24) -> list[Request]:
    return [Request((1, 40 + n, 60), key=seeds.key(0, "vllm", n)) for n in range(count)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_push_is_what_vllm_samples_with(tied: bool, where: str, tmp_path: Path) -> None:
    """After each of twenty updates, sampled and scored log-probabilities agree; greedy answers are the sampler's."""
    own = policy(tied)
    with engine_of(own, where, tmp_path) as engine:
        for push in range(PUSHES):
            for parameter in own.model.parameters():
                parameter.data += 0.02 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(1000 + push)
                )
            engine.load(own, push + 1)
            sampling = Sampling(max_new_tokens=12, temperature=0.7)
            answers = engine.generate(asked(), sampling)
            assert sum(len(answer.ids) for answer in answers) > 100
            reported, scored = reported_and_scored(own, asked(), answers, sampling)
            assert float((reported - scored).abs().mean()) < GAP
        greedy = Sampling(max_new_tokens=12, temperature=0.0)
        ours, theirs = Sampler(own).generate(asked(), greedy), engine.generate(asked(), greedy)
        assert [one.ids for one in ours] == [one.ids for one in theirs]


def scored_on_sets(own: Policy, answers: list[Completion], sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities as reported, and the policy's own on the sets that came with the answers."""
    episodes = [
        Episode(Example("x", "?"), 0, n, [Turn([*request.prompt_ids], one.ids, one.logprobs, kept=one.kept)])
        for n, (request, one) in enumerate(zip(asked(len(answers)), answers, strict=True))
    ]
    batch = collate(episodes, temperature=sampling.temperature, stop_ids=own.stop_ids)
    scored = own.compute_logprobs_no_grad(batch).logprobs
    return batch.require("logprobs_sampler")[batch.actions], scored[batch.actions]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WHERE)
def test_the_sets_of_top_k_are_those_of_the_sampler(where: str, tmp_path: Path) -> None:
    """Each set has the tokens that top_k keeps of the policy's own logits. On them the log-probabilities are the
    policy's, and on the whole vocabulary they are not. Of a server that gives too few log-probabilities the sentence
    says how to start it."""
    own = policy()
    sampling = Sampling(max_new_tokens=12, temperature=0.7, top_k=5)
    with engine_of(own, where, tmp_path, "--max-logprobs", 5 + SPARE) as engine:
        answers = engine.generate(asked(), sampling)
        reported, scored = scored_on_sets(own, answers, sampling)
        assert float((reported - scored).abs().mean()) < GAP
        whole = reported_and_scored(own, asked(), answers, sampling)[1]
        assert float((reported - whole).abs().mean()) > 0.1
        for request, answer in zip(asked(), answers, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
            with torch.no_grad():
                logits = own.model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            kept = unpack(torch.from_numpy(answer.kept), own.vocabulary)
            edge = logits.topk(5).values[:, -1]  # beside it rounding decides
            assert torch.equal(kept.sum(1), torch.full((len(answer.ids),), 5))
            assert bool((logits.masked_fill(~kept, math.inf).amin(1) > edge - 1e-4).all())
            assert bool((logits.masked_fill(kept, -math.inf).amax(1) < edge + 1e-4).all())
        fewer = replace(sampling, top_p=0.8, min_p=0.1)
        answers = engine.generate(asked(), fewer)
        reported, scored = scored_on_sets(own, answers, fewer)
        assert float((reported - scored).abs().mean()) < GAP
        sizes = torch.cat([unpack(torch.from_numpy(one.kept), own.vocabulary).sum(1) for one in answers])
        assert int(sizes.min()) < 5 and int(sizes.max()) <= 5
        if where == "servers":
            with pytest.raises(LmgymError, match=rf"started with --max-logprobs {6 + SPARE} or more"):
                engine.generate(asked(1), replace(sampling, top_k=6))
        evaluation = Decoding(max_new_tokens=12, temperature=0.7, top_k=9)  # nothing trains on its answers
        assert all(one.kept is None for one in engine.generate(asked(4), evaluation))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WHERE)
def test_a_head_that_stayed_old_is_caught_by_the_canary(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tied checkpoint without its head vLLM keeps the old head, and says nothing."""
    own = policy()

    def without_head(chosen: Policy, merge: bool = True) -> dict[str, torch.Tensor]:
        return {name: one for name, one in weights_of(chosen, merge).items() if "lm_head" not in name}

    with engine_of(own, where, tmp_path) as engine:
        own.model.get_input_embeddings().weight.data *= 1.5
        for module in (vllm_here, vllm_servers):
            monkeypatch.setattr(module, "weights_of", without_head)
        with pytest.raises(LmgymError, match="samples with other weights than the policy's"):
            engine.load(own, 1)


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_server_that_takes_adapters_gets_the_base_model_once(tmp_path: Path) -> None:
    """After each of five updates it samples with the newest adapters; a server without --enable-lora gets them merged,
    and samples with the same distribution."""
    own = load_policy(PolicySection(device="cpu", architecture=SHAPE, lora_rank=4))
    sampling = Sampling(max_new_tokens=12, temperature=0.7)
    with (
        server(own, tmp_path / "one", "--enable-lora", "--max-lora-rank", 8) as (address, _),
        server(own, tmp_path / "other") as (other, _),
    ):
        adapters = VLLM(own, Servers([address], tmp_path / "served"))
        merged = VLLM(own, Servers([other], tmp_path / "served-merged"))
        for push in range(5):
            for parameter in own.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(push))
            for engine in (adapters, merged):
                engine.load(own, push + 1)
                answers = engine.generate(asked(), sampling)
                reported, scored = reported_and_scored(own, asked(), answers, sampling)
                assert float((reported - scored).abs().mean()) < GAP
        [folder] = (tmp_path / "served").glob("lmgym-*")
        assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
        adapters.close()
        merged.close()
    log, other_log = ((tmp_path / name / "log.txt").read_text() for name in ("one", "other"))
    assert log.count("POST /collective_rpc") == 1 and log.count("POST /v1/load_lora_adapter") == 1 + 5
    assert other_log.count("POST /collective_rpc") == 1 + 5 and "load_lora_adapter HTTP" not in other_log


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_named_within_the_limit(tmp_path: Path) -> None:
    own = policy()
    with server(own, tmp_path) as (address, process):
        engine = VLLM(own, Servers([address], tmp_path / "served", seconds=30.0))
        threading.Timer(0.5, lambda: os.killpg(process.pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(LmgymError, match=rf"engine\.address: .*{address}"):
            for _ in range(1000):
                engine.generate(asked(64), Sampling(max_new_tokens=400, min_new_tokens=400))
        assert time.monotonic() - began < 40


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WHERE)
def test_a_conversation_with_a_tool_has_the_same_ids_on_both_sides(where: str, tmp_path: Path) -> None:
    """Ten turns, decoded greedily: each prompt is the ids of the turns before, never their text tokenized again."""
    own = policy()
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    with engine_of(own, where, tmp_path) as engine:
        sampler = Sampler(own)
        sides: list[tuple[int, ...]] = [(1, 50, 51), (1, 50, 51)]
        for turn in range(10):
            for number, one in enumerate((engine, sampler)):
                answer = one.generate([Request(sides[number], key=turn, conversation=7)], greedy)[0]
                sides[number] = (*sides[number], *answer.ids, 40 + turn, 41)  # and what the tool said
            assert sides[0] == sides[1]


SEEING = "builtin:tiny_idefics3"
EVERY_SEEING = [
    *(pytest.param(one.values[0], SEEING, marks=one.marks) for one in WHERE),
    *(pytest.param("here", one, marks=HAS_VLLM) for one in ("smolvlm", "llava_onevision", "qwen2_5_vl", "qwen3_vl")),
]


def seeing(model: str, folder: Path) -> tuple[Policy, list[Request]]:
    """A policy that reads pictures and trains its tower; prompts with one picture, with none and with two. Skips a
    family whose packages vLLM lacks here."""
    if model != SEEING:
        try:
            check_pictures(model, here=True)
        except LmgymError as lacking:
            pytest.skip(str(lacking))
        model = str(vision_models.write(model, folder / "seeing", width=64))  # vLLM wants heads of 32
    own = load_policy(PolicySection(model=model, device="cpu", train_vision=True))
    if model == SEEING:
        own = own.with_model(models.sharpen(own.model, 0.2))
    assert own.vision is not None
    drawn = own.vision.reader.pictures = vision_models.Drawn()
    one, other = (
        picture_tokens(own.vision.processor, digest := drawn.draw(n, 40, 24), drawn.open(digest)) for n in (1, 2)
    )
    prompts = ((1, 50, *one, 60), (1, *other, 61), (1, 50, 60), (1, *other, 7, *one, 61))
    return own, [Request(prompts[n % 4], key=seeds.key(0, "vllm", n)) for n in range(24)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("where", "model"), EVERY_SEEING)
def test_pictures_go_beside_the_ids(where: str, model: str, tmp_path: Path) -> None:
    """After each update, of the vision tower too, vLLM samples as the policy scores: it has the newest tower, and reads
    the pictures as lmgym does. Ids that are not lmgym's are found out. (`-s` shows the gaps.)"""
    own, requests = seeing(model, tmp_path)
    with engine_of(own, where, tmp_path) as engine:
        for push in range(3):
            with torch.no_grad():
                for parameter in own.parameters():
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 + push))
                    parameter += 0.02 * noise
            engine.load(own, push + 1)
            sampling = Sampling(max_new_tokens=12, temperature=0.7)
            answers = engine.generate(requests, sampling)
            reported, scored = reported_and_scored(own, requests, answers, sampling)
            gap = (reported - scored).abs()
            print(f"{model}, push {push}: {float(gap.mean()):.0e}, at most {float(gap.max()):.0e} nats a token")
            assert float(gap.mean()) < SEEING_GAP
            assert all(own.never[0] not in answer.ids for answer in answers)
        greedy = Sampling(max_new_tokens=12, temperature=0.0)
        ours, theirs = Sampler(own).generate(requests, greedy), engine.generate(requests, greedy)
        assert [one.ids for one in ours] == [one.ids for one in theirs]
        if model != SEEING:
            return
        own.vision.processor.image_seq_len = 9  # of another processor
        own.vision.reader._pixels.clear()
        name, image = next(iter(own.vision.reader.pictures.items()))
        prompt = (1, 50, *picture_tokens(own.vision.processor, name, image))
        with pytest.raises(LmgymError, match="vLLM reads a prompt with a picture as 21 tokens, and lmgym as 14; they"):
            engine.generate([Request(prompt, key=1)], greedy)


@HAS_VLLM
@pytest.mark.timeout(900)
def test_vllm_here_leaves_training_as_it_was() -> None:
    """No bit of what the policy computes, no random number and no number of threads moves."""
    own = policy()
    state, threads, setter = torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads
    before = Sampler(own).generate(asked(), Sampling(max_new_tokens=12))
    with engine_of(own, "here", Path()) as engine:
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads and torch.set_num_threads is setter
        engine.generate(asked(), Sampling(max_new_tokens=12))
        assert Sampler(own).generate(asked(), Sampling(max_new_tokens=12)) == before
        answers = engine.generate(asked(64), Sampling(max_new_tokens=64, stop=("x",)))
        assert any(one.stop == "stop" for one in answers)
        assert all((one.stop == "stop") == ("x" in own.tokenizer.decode(one.ids)) for one in answers)


@HAS_VLLM
@pytest.mark.timeout(900)
def test_a_run_with_vllm_here_stops_and_goes_on(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"engine": {"name": "vllm", "cache_gib": 0.25}, "policy": RANKS["policy"], "steps": 4}
    run = runs.run(tmp_path / "run", Interrupting(at=2), **changes)
    assert not (run / "final").exists()
    runs.run(run, **changes)
    steps = [one for one in runs.records(run / "metrics.jsonl") if one["kind"] == "train"]
    assert len(steps) == 4 and all(0 <= one["sampler_logprob_gap"] < GAP for one in steps)


@contextmanager
def stand_in(answer: Callable[[dict], list[dict]]) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks as vLLM does, and samples what `answer` says: a token's log-probability and those of the
    likeliest ones. Its address, and the paths that it was asked for."""
    asked_for: list[str] = []
    version = "0"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say({"data": [{"max_model_len": 512}]})

        def do_POST(self) -> None:
            nonlocal version
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked_for.append(self.path)
            if self.path == "/update_weight_version":
                version = body["new_version"]
            content = answer(body) if "generate" in self.path else []
            choice = {"token_ids": [one["token_id"] for one in content], "logprobs": {"content": content}}
            self.say({"choices": [choice | {"weight_versions": [{"version": version}]}]})

        def say(self, tree: dict) -> None:
            data = json.dumps(tree).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", asked_for
    http.shutdown()
    http.server_close()


def sampled(kept: Sequence[int], cut: int) -> Callable[[dict], list[dict]]:
    """Answers whose tokens are all the first of the kept ones, which are equally likely; `cut` others are not kept."""

    def answer(body: dict) -> list[dict]:
        listed = [*((token, -math.log(len(kept))) for token in kept), *((200 + n, -9999.0) for n in range(cut))]
        listed = listed[: body["sampling_params"]["logprobs"]]
        top = [{"token_id": token, "logprob": logprob} for token, logprob in listed]
        return [{**top[0], "top_logprobs": top}] * body["sampling_params"]["max_tokens"]

    return answer


@pytest.mark.parametrize("kept", [[5], [70, 5, 40], [*range(80, 60, -1)]], ids=["fewer", "equal", "ties"])
def test_the_sets_of_top_k_are_read_from_the_log_probabilities(
    kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether fewer than top_k are possible (min_new_tokens excludes stop ids) or more are equally likely."""
    monkeypatch.setattr(VLLM, "_try", lambda engine: None)
    own = policy()
    with stand_in(sampled(kept, SPARE + 3)) as (address, _):
        engine = VLLM(own, Servers([address], tmp_path / "served"))
        sampling = Sampling(max_new_tokens=4, top_k=5)
        [answer] = engine.generate(asked(1), sampling)
        assert answer.ids == [kept[0]] * 4 and answer.kept is not None
        sets = unpack(torch.from_numpy(answer.kept), own.vocabulary)
        assert [row.nonzero().flatten().tolist() for row in sets] == [sorted(kept)] * 4
        reported, scored = scored_on_sets(own, [answer], sampling)
        assert len(scored) == len(reported) == 4
        with pytest.raises(LmgymError, match=r"take more than sampling\.kept_gib"):
            engine.generate(asked(1), replace(sampling, kept_gib=1e-9))
        engine.close()


def test_sets_that_are_not_known_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More equally likely tokens than a server was asked for; and top_p alone, whose sets have no bound."""
    monkeypatch.setattr(VLLM, "_try", lambda engine: None)
    with stand_in(sampled(range(60, 60 + 5 + SPARE), 0)) as (address, _):
        engine = VLLM(policy(), Servers([address], tmp_path / "served"))
        with pytest.raises(LmgymError, match=rf"top_k is 5, and vLLM drew a token from {5 + SPARE} or more"):
            engine.generate(asked(1), Sampling(max_new_tokens=4, top_k=5))
        for cut in ({"top_p": 0.9}, {"min_p": 0.1}):
            with pytest.raises(LmgymError, match=r"so top_p and min_p need top_k beside them"):
                engine.generate(asked(1), Sampling(max_new_tokens=4, **cut))
        with pytest.raises(LmgymError, match=r"evaluation\.generation: vllm searches no beams"):
            engine.generate(asked(1), Decoding(max_new_tokens=4, generation={"num_beams": 2}))
        engine.close()


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"name": "vllm", "ahead": 1}, r"engine\.ahead: vLLM in the training process computes on the processors"),
        ({"name": "vllm", "seconds": 9.0}, r"engine\.seconds is a limit of servers"),
        ({"name": "vllm", "address": "http://a", "cache_gib": 1.0}, r"engine\.cache_gib is for vLLM in this process"),
        ({"cache_gib": 1.0}, r"engine\.cache_gib is for another engine; write engine\.name: vllm"),
        ({"name": "vllm", "address": "localhost:8000"}, r"vllm needs the address of each server, such as http"),
        ({"name": "vllm", "address": "http://a", "unit": 4}, r"engine\.unit: vllm decides itself"),
        ({"name": "vllm", "address": "http://a", "workers": 2}, r"engine\.workers is for another engine"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(engine: dict, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(runs.tiny(engine=engine))


def test_a_stage_that_samples_by_top_p_is_refused() -> None:
    servers = {"name": "vllm", "address": "http://a"}
    build_config(runs.tiny(engine=servers, sampling={"max_new_tokens": 4, "top_k": 5}))
    build_config(runs.tiny(engine=servers, sampling={"max_new_tokens": 4, "top_k": 5, "top_p": 0.5, "min_p": 0.1}))
    with pytest.raises(LmgymError, match=r"has top_p or min_p alone; write sampling\.top_k beside them"):
        build_config(runs.tiny(engine=servers, sampling={"max_new_tokens": 4, "top_p": 0.5}))


def test_vllm_here_without_vllm_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(availability.NEEDS, "vllm", availability.Need(lambda: False, availability.VLLM))
    with pytest.raises(LmgymError, match=r"engine\.name: vLLM is not installed; install it .* or give engine\.address"):
        runs.run(tmp_path / "run", engine={"name": "vllm"})
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"no vLLM answers at http://127\.0\.0\.1:1 .*; start it again, then resume"):
        runs.run(tmp_path / "run", engine={"name": "vllm", "address": "http://127.0.0.1:1"})


def test_merged_adapters_in_bf16_are_rounded_stochastically_or_warned_of(tmp_path: Path) -> None:
    """bf16 has 8 significant bits: 1 + 2^-9 is rounded to 1."""
    assert float(torch.tensor(1 + 2**-9).bfloat16()) == 1 < float(torch.tensor(1 + 2**-8 + 2**-9).bfloat16())
    section = PolicySection(device="cpu", architecture=SHAPE, lora_rank=2, compute="bfloat16")
    assert lost_updates(load_policy(section), Here()) == ""
    adapted = load_policy(replace(section, rounding="nearest"))
    servers = Servers(["http://127.0.0.1:1"], tmp_path)
    assert "rounded away" in lost_updates(adapted, Here()) and "compute: float32" in lost_updates(adapted, Here())
    assert "--enable-lora" in lost_updates(adapted, servers)
    servers.takes_adapters = True
    assert lost_updates(adapted, servers) == "" == lost_updates(policy(), Here())
    adapted.compute = torch.float32
    assert lost_updates(adapted, Here()) == ""


def test_the_tied_head_is_written_too(tmp_path: Path) -> None:
    own = policy()
    write_weights(own, tmp_path / "served")
    tensors = load_file(tmp_path / "served/model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_teacher_on_a_server_is_that_teacher_here(tmp_path: Path) -> None:
    """Its most likely tokens, and the divergence from all of them; then what it refuses, and a run."""
    teacher, policy_here = policy(), load_policy(PolicySection(device="cpu"))
    batch = models.batch_of(models.episodes(4, turns=1))
    whole = teacher.vocabulary
    with server(teacher, tmp_path, "--max-logprobs", whole) as (address, _):
        served = {k: EndpointTeacher(ServedTeacher(f"{address}/v1", k), whole) for k in (20, whole)}
        for one in served.values():
            assert one.reach(teacher.tokenizer).compared and one.context == 511
        found = served[20].top_logprobs(batch)
        row, column = batch.actions.nonzero(as_tuple=True)
        with torch.no_grad():
            said = teacher.model(batch.tokens, attention_mask=batch.mask.long()).logits[row, column - 1].log_softmax(-1)
        near = rounding.tolerance(teacher.model)
        assert torch.allclose(found.logprobs[:, :-1], said.topk(20).values, rtol=0, atol=near)
        assert torch.allclose(said.gather(1, found.ids.long()), said.topk(20).values, rtol=0, atol=near)
        policy_here.teacher = teacher
        local, algorithm = GKD(teacher="t"), GKD(teacher=f"{address}/v1")
        ours = models.gradient(local, policy_here, prepare(batch, policy_here, {}, local))
        theirs = models.gradient(
            algorithm, policy_here, prepare(batch, policy_here, {"teacher": served[whole]}, algorithm)
        )
        assert ours[1]["loss/divergence"] == pytest.approx(theirs[1]["loss/divergence"], abs=near)
        assert models.relative(ours[0], theirs[0]) < near
        with pytest.raises(LmgymError, match=rf"started with --max-logprobs {whole + 1} or more"):
            EndpointTeacher(ServedTeacher(f"{address}/v1", whole + 1), whole).reach(teacher.tokenizer)
        with pytest.raises(LmgymError, match=r"has no model 'other', and algorithm\.teacher_model must name one"):
            EndpointTeacher(ServedTeacher(f"{address}/v1", 20, "other"), whole).reach(teacher.tokenizer)
        section = {"name": "gkd", "teacher": f"{address}/v1", "top_k": 20}
        folder = runs.run(tmp_path / "run", algorithm=section, rewards=None, steps=3)
    steps = [one for one in runs.records(folder / "metrics.jsonl") if one["kind"] == "train"]
    assert len(steps) == 3 and all(one["loss/divergence"] > 0 for one in steps)


@WITH_VLLM
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_several_ranks_share_a_server_and_push_once(group: Group, tmp_path: Path) -> None:
    """Each rank asks for its own answers, and none before the server has the weights: every answer has their version,
    and agrees with the policy. With top_k the sets travel between the ranks too."""
    sampling = {"max_new_tokens": 6, "top_k": 20}
    with server(policy(), tmp_path, "--max-logprobs", 20 + SPARE) as (address, _):
        changes = {"engine": {"name": "vllm", "address": address}, "sampling": sampling, "evaluation": {"every": 0}}
        recipe = runs.write(tmp_path / "recipe.yaml", **changes, **RANKS)
        assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'run'}"]) == [0, 0], group.said() + group.said(1)
    steps = [one for one in runs.records(tmp_path / "run/metrics.jsonl") if one["kind"] == "train"]
    assert len(steps) == 3 and all(0 <= one["sampler_logprob_gap"] < GAP for one in steps)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("POST /collective_rpc") == 1 + 3  # when the run begins, and after each step
    assert log.count("POST /inference/v1/generate") >= 2 * 6 + 3 * 4 * 4  # proofs, and the answers of all steps


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_fails_the_canary_ends_all_ranks(group: Group, tmp_path: Path) -> None:
    """The first rank alone has pushed and tried; the others say the same sentence, and write nothing."""
    wrong = {"token_id": 40, "logprob": -0.5, "top_logprobs": []}
    with stand_in(lambda body: [wrong] * body["sampling_params"]["max_tokens"]) as (address, asked_for):
        recipe = runs.write(tmp_path / "recipe.yaml", engine={"name": "vllm", "address": address}, **RANKS)
        assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'run'}"]) == [1, 1]
    assert asked_for.count("/collective_rpc") == 1 and asked_for.count("/inference/v1/generate") == 6
    for rank in (0, 1):
        assert group.said(rank).count("samples with other weights than the policy's") == 1
        assert "lost the connection" not in group.said(rank)
