"""The branches that only a GPU takes, walked on a GPU that is not there (tests/pretend_cuda.py).

Each test fails too where an operation takes operands of both devices, or a graph's capture would wait for the GPU."""

import copy
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lmgym import GRPO
from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.process_group import ProcessGroup
from lmgym.distributed.ranks import RankLost, Ranks
from lmgym.inference.base import Request, Sampling
from lmgym.inference.completions import Answers
from lmgym.inference.drawing import Drawing
from lmgym.inference.kernels import cuda_graphs
from lmgym.inference.vllm.here import Here
from lmgym.models.attention_probe import attention_rules
from lmgym.models.device import head_rows
from lmgym.models.kernels import fused_logprobs
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training import setup
from lmgym.training.machine import check_gpus
from tests import models, runs
from tests.parity.test_families import model_of
from tests.pretend_cuda import called, pretended_cuda  # noqa: F401 (a fixture)
from tests.pretend_devices import labels

ON_GPU = runs.TINY["policy"] | {"device": "cuda", "compute": "float32"}
BF16 = {"compute": "bfloat16"}
LORA = BF16 | {"lora_rank": 2}
PPO = {"name": "ppo", "epochs": 2, "minibatches": 2, "kl_coefficient": 0.1}
RECIPES: dict[
    str, tuple[dict[str, Any], set[str]]
] = {  # a recipe, and what of torch.cuda and torch.compile it must call
    "as it is": ({}, set()),
    "graphs": ({"engine": {"captured": True}}, {"graph", "CUDAGraph.replay"}),
    "flex": (
        {"policy": ON_GPU | {"attention": "flex"}},
        {"compile create_block_mask", "compile flex_attention", "flex_attention"},
    ),
    "bf16, LoRA and graphs": ({"policy": ON_GPU | LORA, "engine": {"captured": True}}, {"CUDAGraph.replay"}),
    "bf16": ({"policy": ON_GPU | BF16}, set()),
    "bf16, rounded to nearest": ({"policy": ON_GPU | BF16 | {"rounding": "nearest"}}, set()),
    "bf16 and a critic of its own": ({"algorithm": PPO, "policy": ON_GPU | BF16 | {"critic": "separate"}}, set()),
    "bf16 and flex": ({"policy": ON_GPU | BF16 | {"attention": "flex"}}, {"flex_attention"}),
    "a value head and a reference": ({"algorithm": PPO, "policy": ON_GPU | {"critic": "head"}}, set()),
    "beams": ({"evaluation": {"every": 3, "examples": 4, "generation": {"num_beams": 2}}}, set()),
    "the plain path": ({"policy": ON_GPU | {"path": "plain"}}, set()),
    "answers drawn by generate": (
        {"evaluation": {"every": 3, "examples": 4, "temperature": 1.0, "generation": {"typical_p": 0.9}}},
        {"get_rng_state"},
    ),
}
pytestmark = pytest.mark.usefixtures("pretended_cuda")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of several shapes also for answers of six tokens."""
    monkeypatch.setattr(cuda_graphs, "WIDTH", 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_from_start_to_end(name: str, tmp_path: Path) -> None:
    changes, expected = RECIPES[name]
    folder = runs.run(tmp_path / "run", **{"policy": ON_GPU, **changes})
    assert expected | {"max_memory_allocated", "get_device_name"} <= set(called)
    losses = [record["loss/policy"] for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(losses) == 6 and all(torch.tensor(losses).isfinite())


@pytest.mark.slow
def test_graphs_sample_what_single_steps_sample(tmp_path: Path) -> None:
    one, other = (
        runs.run(tmp_path / str(captured), policy=ON_GPU, engine={"captured": captured}) for captured in (False, True)
    )
    answers = [
        [turn["action_ids"] for record in runs.records(run / "rollouts.jsonl") for turn in record["turns"]]
        for run in (one, other)
    ]
    assert answers[0] and answers[0] == answers[1]


@pytest.mark.slow
def test_a_run_goes_on(tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", policy=ON_GPU)
    runs.run(tmp_path / "parts", policy=ON_GPU, steps=4)
    runs.run(tmp_path / "parts", policy=ON_GPU)
    weights = [(runs.newest(folder) / "model.safetensors").read_bytes() for folder in (whole, tmp_path / "parts")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_check_times_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(runs.write(tmp_path / "recipe.yaml", policy=ON_GPU))])
    shown = capsys.readouterr()
    assert "on cuda" in shown.out and "synchronize" in called and "Traceback" not in shown.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"eval": [], "generate": ["--prompt", "1 + 1 ="]}
    folder = runs.run(tmp_path / "run", policy=ON_GPU)
    assert main([command, str(folder), *arguments[command]]) == 0, capsys.readouterr()


@pytest.mark.slow
def test_what_a_run_says_of_the_gpu(tmp_path: Path) -> None:
    """Another GPU would compute other bits: its name is in the fingerprint."""
    folder = runs.run(tmp_path / "run", policy=ON_GPU)
    found = json.dumps([json.loads(path.read_text()) for path in folder.rglob("fingerprint.json")])
    assert "Pretended, CUDA" in found


def test_a_tensor_that_was_left_on_the_cpu_is_found_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(self: Any, batch: Any, new: Any) -> Any:
        return {"policy": (new.logprobs * torch.ones(new.logprobs.shape), "token")}, {}

    monkeypatch.setattr(GRPO, "loss", loss)
    with pytest.raises(Exception, match="operands of mul on both devices"):
        runs.run(tmp_path / "run", policy=ON_GPU)
    labels.refused.clear()


@pytest.mark.parametrize("family", ["gemma2", "llama4_text"])
def test_what_the_layers_of_a_family_ask_is_read_there_too(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    assert attention_rules(model.to("cuda")) == attention_rules(model_of(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_works_there_in_whole_chunks(dtype: torch.dtype) -> None:
    def rows_of_tiles(device: str) -> list[int]:
        hidden, head = (torch.ones(shape, dtype=dtype, device=device) for shape in ((7, 1), (fused_logprobs.TILE, 1)))
        found = list(fused_logprobs.tiles(hidden, head, None, lambda logits, part: logits, 4, False))
        return [len(tile.logits) for tile in found]

    assert rows_of_tiles("cuda") == [4, 3] and rows_of_tiles("cpu") == [1] * 7
    assert head_rows(150_000, "cuda") == 447 and head_rows(150_000, "cpu") == 111


class Counted(TorchFunctionMode):
    """How often random numbers went to the GPU, and lists were made of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.lists = 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sent += function is torch.Tensor.to and args[0].dtype == torch.int16
        self.lists += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


def loaded(**settings: Any) -> Policy:
    return load_policy(PolicySection(device="cuda", architecture=runs.ARCHITECTURE, **settings))


def test_random_bits_of_an_update_go_there_once() -> None:
    policy = loaded(compute="bfloat16")
    with Counted() as counted:
        policy.had_updates(1)
        policy.compute_logprobs_no_grad(models.batch_of(models.episodes(2)))
    assert counted.sent == 1


def test_drawn_tokens_are_fetched_once() -> None:
    with Counted() as counted:
        answers = Answers(loaded(compute="float32"), [Request((5, 6), key=1)], Sampling(max_new_tokens=4))
        before = counted.lists
        drawing = Drawing(answers.policy, answers, None, None)
        assert len(drawing.draw([torch.zeros(1, answers.policy.vocabulary, device="cuda")], [0])) == 1
    assert counted.lists - before == 2  # the tokens and their log-probabilities


class Two(Ranks):
    """One of two ranks, beside one that has said the same or `other`."""

    size = 2

    def __init__(self, other: bytes | None = None) -> None:
        self.other = other

    def gather(self, own: bytes) -> list[bytes]:
        return [own, own if self.other is None else self.other]


def test_two_ranks_on_one_gpu_are_refused() -> None:
    config = build_config(runs.tiny(policy=ON_GPU))
    with pytest.raises(LmgymError, match=r"2 ranks have 1 GPU.* start 1 rank.* or write device: cpu"):
        setup.load(config, None, Two(), print)  # type: ignore[arg-type]
    check_gpus(config.policy, Two(b"another"))


def test_a_silent_rank_is_an_exception_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is not in a torch without CUDA, so the group is not made; torch reads the variable when it makes one."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankLost, match="NCCL"):
        ProcessGroup(20.0)
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


@pytest.mark.slow
@pytest.mark.processes
def test_a_pool_needs_as_many_gpus_as_generators() -> None:
    ray_generators = pytest.importorskip("lmgym.inference.pool.ray_generators")
    with pytest.raises(LmgymError, match=r"the generators need 2 GPU\(s\) together, and Ray has 0"):
        ray_generators.RayGenerators(loaded(compute="float32"), workers=2)


def test_vllm_starts_beside_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter is free. Like the real vLLM, this one refuses to start where less is free than its share."""

    def start(gpu_memory_utilization: float = 0.9, **settings: Any) -> Any:
        free, total = torch.cuda.mem_get_info()
        if free < gpu_memory_utilization * total:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        return types.SimpleNamespace(llm_engine=types.SimpleNamespace(model_config=types.SimpleNamespace(**settings)))

    vllm: Any = types.ModuleType("vllm")
    vllm.LLM = start
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    assert Here().reach(loaded(compute="float32")) == 128
