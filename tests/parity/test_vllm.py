"""vLLM servers as the engine, with real ones: skipped unless LMGYM_VLLM names a Python that has vLLM (0.32 was tried).

LMGYM_VLLM=/path/to/venv/bin/python pytest tests/parity/test_vllm.py
"""

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmgym.config.build import build_config
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference import vllm_servers
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.inference.vllm_servers import VLLM, write_weights
from lmgym.models.load import PolicySection, load_policy
from lmgym.models.policy import Policy
from tests import models, runs
from tests.parity.test_sampler import reported_and_scored

PYTHON = os.environ.get("LMGYM_VLLM")
WITH_VLLM = pytest.mark.skipif(PYTHON is None, reason="needs LMGYM_VLLM, a Python that has vLLM")
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": "",
}
PUSHES = 20
GAP = 1e-5  # nats a token, on average


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
def server(own: Policy, folder: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A vLLM server of the policy's architecture: its address and process."""
    own.save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", folder / "model", "--dtype", "float32", "--enforce-eager", "--max-model-len", 512]
    words += ["--host", "127.0.0.1", "--port", port, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *map(str, words)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            time.sleep(1)
            assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                continue
        yield address, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def asked(count: int = 24) -> list[Request]:
    return [Request((1, 40 + n, 60), key=seeds.key(0, "vllm", n)) for n in range(count)]


@WITH_VLLM
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_push_is_what_the_server_samples_with(tied: bool, tmp_path: Path) -> None:
    """After each of twenty updates, sampled and scored log-probabilities agree; greedy answers are the sampler's."""
    own = policy(tied)
    with server(own, tmp_path) as (address, _):
        engine = VLLM(own, [address], tmp_path / "served")
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
        engine.close()


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_head_that_stayed_old_is_caught_by_the_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tied checkpoint without its head vLLM keeps the old head, and says nothing."""
    own = policy()

    def without_head(chosen: Policy, folder: Path) -> None:
        write_weights(chosen, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: one for name, one in tensors.items() if "lm_head" not in name}, folder / "model.safetensors")

    with server(own, tmp_path) as (address, _):
        engine = VLLM(own, [address], tmp_path / "served")
        own.model.get_input_embeddings().weight.data *= 1.5
        monkeypatch.setattr(vllm_servers, "write_weights", without_head)
        with pytest.raises(LmgymError, match="samples with other weights than the policy's"):
            engine.load(own, 1)


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_named_within_the_limit(tmp_path: Path) -> None:
    own = policy()
    with server(own, tmp_path) as (address, process):
        engine = VLLM(own, [address], tmp_path / "served", seconds=30.0)
        threading.Timer(0.5, lambda: os.killpg(process.pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(LmgymError, match=rf"engine\.address: .*{address}"):
            for _ in range(1000):
                engine.generate(asked(64), Sampling(max_new_tokens=400, min_new_tokens=400))
        assert time.monotonic() - began < 40


@WITH_VLLM
@pytest.mark.timeout(900)
def test_a_conversation_with_a_tool_has_the_same_ids_on_both_sides(tmp_path: Path) -> None:
    """Ten turns, decoded greedily: each prompt is the ids of the turns before, never their text tokenized again."""
    own = policy()
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    with server(own, tmp_path) as (address, _):
        engine, sampler = VLLM(own, [address], tmp_path / "served"), Sampler(own)
        sides: list[tuple[int, ...]] = [(1, 50, 51), (1, 50, 51)]
        for turn in range(10):
            for number, one in enumerate((engine, sampler)):
                answer = one.generate([Request(sides[number], key=turn, conversation=7)], greedy)[0]
                sides[number] = (*sides[number], *answer.ids, 40 + turn, 41)  # and what the tool said
            assert sides[0] == sides[1]
        engine.close()


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"name": "vllm"}, r"engine\.address is None; vllm needs the address of each server"),
        ({"name": "vllm", "address": "localhost:8000"}, r"vllm needs the address of each server, such as http"),
        ({"name": "vllm", "address": "http://a", "unit": 4}, r"engine\.unit: vllm decides itself"),
        ({"name": "vllm", "address": "http://a", "workers": 2}, r"engine\.workers is for another engine"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(engine: dict, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(runs.tiny(engine=engine)).check()


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=r"no vLLM answers at http://127\.0\.0\.1:1 .*; start it again, then resume"):
        runs.run(tmp_path / "run", engine={"name": "vllm", "address": "http://127.0.0.1:1"})


def test_the_tied_head_is_written_too(tmp_path: Path) -> None:
    own = policy()
    write_weights(own, tmp_path / "served")
    tensors = load_file(tmp_path / "served/model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
