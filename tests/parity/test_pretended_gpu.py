"""The branches that only a GPU takes, walked on a GPU that is not there (tests/pretend_cuda.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.cli.main import main
from lmgym.inference.kernels import cuda_graphs
from tests import runs
from tests.pretend_cuda import called, pretended_cuda  # noqa: F401 (a fixture)

ON_GPU = runs.TINY["policy"] | {"device": "cuda", "compute": "float32"}
LORA = {"lora_rank": 2, "compute": "bfloat16"}
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


def test_tensors_say_that_they_are_there() -> None:
    tensor = torch.zeros(3, device="cuda")
    assert tensor.device == torch.device("cuda", 0) and tensor.to("cuda:0").is_cuda
    assert torch.nn.Linear(2, 2).to(torch.device("cuda")).weight.device.type == "cuda"


def test_a_graph_computes_again_from_what_stands_at_its_addresses() -> None:
    graph, number = torch.cuda.CUDAGraph(), torch.ones(2)
    with torch.cuda.graph(graph):
        double = number * 2
    number.fill_(5)
    graph.replay()
    assert double.tolist() == [10, 10]


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_from_start_to_end(name: str, tmp_path: Path) -> None:
    changes, expected = RECIPES[name]
    folder = runs.run(tmp_path / "run", **{"policy": ON_GPU, **changes})
    assert expected | {"max_memory_allocated", "get_device_name"} <= set(called)
    losses = [record["loss/policy"] for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(losses) == 6 and all(torch.tensor(losses).isfinite())


def test_graphs_sample_what_single_steps_sample(tmp_path: Path) -> None:
    one, other = (
        runs.run(tmp_path / str(captured), policy=ON_GPU, engine={"captured": captured}) for captured in (False, True)
    )
    answers = [
        [turn["action_ids"] for record in runs.records(run / "rollouts.jsonl") for turn in record["turns"]]
        for run in (one, other)
    ]
    assert answers[0] and answers[0] == answers[1]


def test_a_run_goes_on(tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", policy=ON_GPU)
    runs.run(tmp_path / "parts", policy=ON_GPU, steps=4)
    runs.run(tmp_path / "parts", policy=ON_GPU)
    weights = [(runs.newest(folder) / "model.safetensors").read_bytes() for folder in (whole, tmp_path / "parts")]
    assert weights[0] == weights[1]


def test_check_times_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(runs.write(tmp_path / "recipe.yaml", policy=ON_GPU))])
    shown = capsys.readouterr()
    assert "on cuda" in shown.out and "synchronize" in called and "Traceback" not in shown.err


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"eval": [], "generate": ["--prompt", "1 + 1 ="]}
    folder = runs.run(tmp_path / "run", policy=ON_GPU)
    assert main([command, str(folder), *arguments[command]]) == 0, capsys.readouterr()


def test_what_a_run_says_of_the_gpu(tmp_path: Path) -> None:
    """Another GPU would compute other bits: its name is in the fingerprint."""
    folder = runs.run(tmp_path / "run", policy=ON_GPU)
    found = json.dumps([json.loads(path.read_text()) for path in folder.rglob("fingerprint.json")])
    assert "Pretended, CUDA" in found
