"""What tests/parity/test_resume.py shows of causal models and their algorithms, of encoder-decoders, value functions,
adapters and frozen copies: 6 steps equal 3 + resume + 3, bit for bit. Compared is every file of the last checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.contract.test_every_algorithm import policy_section
from tests.parity.test_resume import Interrupting

pytestmark = [pytest.mark.slow]

PPO = {"name": "ppo", "epochs": 2, "kl_coefficient": 0.1, "kl_target": 0.05}
LORA = {"lora_rank": 4}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
CASES: dict[str, dict[str, Any]] = {
    "t5, critic on its trunk": {"policy": policy_section("builtin:tiny_t5"), "algorithm": PPO},
    "t5, critic apart": {"policy": policy_section("builtin:tiny_t5", critic="separate"), "algorithm": PPO},
    "t5, critic apart, adapters": {
        "policy": policy_section("builtin:tiny_t5", critic="separate", **LORA),
        "algorithm": {"name": "a2c"},
    },
    "causal, adapters, reference": {
        "policy": policy_section("builtin:tiny", **LORA),
        "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
    },
    "bart, adapters, critic on its trunk": {"policy": policy_section("builtin:tiny_bart", **LORA), "algorithm": PPO},
    "bart, bf16": {
        "policy": policy_section("builtin:tiny_bart", compute="bfloat16"),
        "algorithm": {"name": "grpo", "group_size": 4},
    },
    "causal, bf16, critic apart": {
        "policy": policy_section("builtin:tiny", critic="separate", compute="bfloat16"),
        "algorithm": PPO,
    },
    "causal, bf16, adapters": {
        "policy": policy_section("builtin:tiny", compute="bfloat16", **LORA),
        "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
    },
    "causal, bf16, kernels for updates": {
        "policy": {**policy_section("builtin:tiny", compute="bfloat16"), "architecture": WIDE},
        "algorithm": PPO,
    },
    "rmsprop": {
        "algorithm": {"name": "a2c"},
        "optimizer": {"name": "rmsprop", "learning_rate": 0.003, "critic_learning_rate": 0.01, "schedule": "linear"},
    },
}


def assert_equal_folders(one: Path, other: Path) -> None:
    """Every file of both newest checkpoints and of the frozen copies, and what the runs have logged."""
    assert runs.newest(one).name == runs.newest(other).name
    for name in (f"checkpoints/{runs.newest(one).name}", "copies", "final"):
        files = [
            sorted(path.relative_to(run).as_posix() for path in (run / name).rglob("*") if path.is_file())
            for run in (one, other)
        ]
        assert files[0] == files[1] and (files[0] or name == "copies")
        for file in files[0]:
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
    for name in ("rollouts.jsonl", "summary.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert runs.records(one / "metrics.jsonl") == runs.records(other / "metrics.jsonl")


def assert_resumes(folder: Path, at: int, **changes: Any) -> Path:
    whole = runs.run(folder / "whole", **changes)
    halves = runs.run(folder / "halves", Interrupting(at=at), **changes)
    assert not (halves / "final").exists()
    runs.run(halves, **changes)
    assert_equal_folders(whole, halves)
    trained = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    assert all(record["gradient_norm"] > 0 for record in trained)  # equality proves little where nothing moves
    return whole


@pytest.mark.parametrize("name", CASES)
def test_three_steps_and_three_more_equal_six(name: str, tmp_path: Path) -> None:
    whole, policy = assert_resumes(tmp_path, 3, **CASES[name]), CASES[name].get("policy", {})
    checkpoint = runs.newest(whole)
    apart = policy.get("critic") == "separate"
    assert (checkpoint / "critic/value_head.safetensors").is_file() == apart
    learns = CASES[name]["algorithm"]["name"] != "grpo"
    assert (checkpoint / "value_head.safetensors").is_file() == (learns and not apart)
    assert (checkpoint / "adapter_model.safetensors").is_file() == ("lora_rank" in policy)
    taken = runs.state(whole)["copies"]
    assert taken == ({"reference": 0} if CASES[name]["algorithm"] is PPO and "lora_rank" not in policy else {})


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_warm_start_and_then_ppo_resumes_anywhere(at: int, tmp_path: Path) -> None:
    """Stopped in the first stage, at the boundary, in the second; the reference is what the first stage has left."""
    stages = [{"name": "warm", "algorithm": "supervised", "steps": 3}, {"name": "rl", "steps": 3}]
    changes = {"policy": policy_section("builtin:tiny_bart"), "algorithm": PPO, "stages": stages}
    whole = assert_resumes(tmp_path, at, **changes, checkpoint={"every": 1, "keep": 1})
    assert [path.name for path in (whole / "copies").iterdir()] == ["stage-1-reference-step-000000"]


@pytest.mark.parametrize("at", [2, 4])
def test_the_reference_of_a_second_stage_with_adapters(at: int, tmp_path: Path) -> None:
    """A merged copy of what the first stage has left, no longer the model before its adapters."""
    stages = [{"name": "warm", "algorithm": "supervised", "steps": 3}, {"name": "rl", "steps": 3}]
    changes = {"policy": policy_section("builtin:tiny_t5", **LORA), "algorithm": PPO, "stages": stages}
    whole = assert_resumes(tmp_path, at, **changes)
    (copied,) = (whole / "copies").iterdir()
    assert (copied / "model.safetensors").is_file() and not (copied / "adapter_config.json").exists()
