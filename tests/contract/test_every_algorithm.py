"""Every algorithm trains every kind of model, with and without adapters, in one turn and in several: a user changes
`policy.model`, and nothing else."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmgym.cli.main import main
from lmgym.core import registry
from lmgym.models.load import load_policy
from lmgym.models.lora import merged
from lmgym.models.policy_section import PolicySection
from tests import runs

pytestmark = [pytest.mark.slow]

MODELS: dict[str, dict[str, Any]] = {
    "builtin:tiny": runs.ARCHITECTURE,
    "builtin:tiny_t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "builtin:tiny_bart": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 128,
    },
}
LORA = {"lora_rank": 4, "lora_alpha": 16}
# What an algorithm cannot do without, or would do nothing with in two steps.
NEEDED: dict[str, dict[str, Any]] = {"grpo": {"group_size": 4}, "rloo": {"group_size": 4}, "dapo": {"group_size": 4}}
SHORT = {
    "steps": 2,
    "evaluation": {"every": 0, "examples": 2},
    "checkpoint": {"every": 0},
    "logs": {"samples": 0},
    "optimizer": {"learning_rate": 0.003, "warmup": 0},
}

# What cannot be had of two answers (an interval), or of a time without an answer.
MAY_BE_UNKNOWN = ("/low", "/high", "tokens_per_second/rollout")

every_model = pytest.mark.parametrize("model", MODELS)


def algorithm_section(name: str, model: str) -> dict[str, Any]:
    needed = dict(NEEDED.get(name, {}))
    if name in ("distill", "gkd"):
        needed["teacher"] = model  # the built-in size of it, which is not the policy's
    return {"name": name, **needed}


def policy_section(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "device": "cpu", "architecture": MODELS[model], **more}


def train(folder: Path, model: str, algorithm: dict[str, Any], **changes: Any) -> Path:
    return runs.run(folder, **SHORT | {"policy": policy_section(model), "algorithm": algorithm, **changes})


@functools.cache
def before(model: str) -> dict[str, torch.Tensor]:
    """The model's weights as they are before any training."""
    policy = load_policy(PolicySection(**policy_section(model)), seed=0)
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def assert_trained(folder: Path, model: str, lora: bool) -> None:
    """The policy has moved, with adapters only where they are, and every number of the log is finite."""
    final = load_file(folder / "final/model.safetensors")
    moved = {name for name, tensor in final.items() if not torch.equal(tensor, before(model)[name])}
    assert moved
    if lora:
        section = PolicySection(**policy_section(model, **LORA))
        trained = load_policy(section, seed=0, folder=runs.newest(folder))
        layers = {name.split(".lora_")[0] for name, _ in trained.model.named_parameters() if ".lora_" in name}
        assert layers and moved <= {f"{layer}.weight" for layer in layers}
        plain = merged(trained.model).state_dict()
        assert all(torch.equal(plain[name], tensor) for name, tensor in final.items())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [0, 1]
    for record in records:  # the log writes null for NaN and infinity
        numbers = {name: math.nan if value is None else value for name, value in record.items()}
        numbers = {name: value for name, value in numbers.items() if isinstance(value, float)}
        assert all(math.isfinite(value) or name.endswith(MAY_BE_UNKNOWN) for name, value in numbers.items()), record
    assert any(record.get("gradient_norm", 1.0) > 0 for record in steps)


with_and_without_adapters = pytest.mark.parametrize("lora", [False, True])


# Presets of grpo whose batches, passes and drivers are grpo's; tests/property/test_grpo_family.py has their gradients.
SAME_PASSES = (
    "icepop", "gspo_token", "gmpo", "luspo", "vespo", "ce_gppo", "ipo_mask", "clip_cov", "maxrl", "gpg", "opo",
    "pass_at_k", "gfpo", "remax", "hgpo",
)  # fmt: skip


@with_and_without_adapters
@every_model
@pytest.mark.parametrize(
    "algorithm",
    [name for name in registry.BUILTIN["algorithm"] if not name.endswith("reward_model") and name not in SAME_PASSES],
)
def test_one_turn(algorithm: str, model: str, lora: bool, tmp_path: Path) -> None:
    section = algorithm_section(algorithm, model)
    changes: dict[str, Any] = {"task": runs.GIVEN[algorithm]} if algorithm in runs.GIVEN else {}
    policy = policy_section(model, **(LORA if lora else {}))
    folder = train(tmp_path / "run", model, section, policy=policy, **changes)
    assert_trained(folder, model, lora)


SAMPLING = [name for name in registry.BUILTIN["algorithm"] if name not in ("supervised", *runs.GIVEN, *SAME_PASSES)]


@with_and_without_adapters
@every_model
@pytest.mark.parametrize("algorithm", SAMPLING)
def test_two_turns(algorithm: str, model: str, lora: bool, tmp_path: Path) -> None:
    policy = policy_section(model, **(LORA if lora else {}))
    changes = {"policy": policy, "env": {"name": "tests.quiz:Quiz", "workers": 0}, "rewards": None}
    folder = train(tmp_path / "run", model, algorithm_section(algorithm, model), **changes)
    assert_trained(folder, model, lora)
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts and all(len(rollout["turns"]) == 2 for rollout in rollouts)


@pytest.mark.parametrize("critic", ["head", "separate"])
@every_model
def test_either_critic(critic: str, model: str, tmp_path: Path) -> None:
    ppo = {"name": "ppo", "kl_coefficient": 0.1, "kl_target": 0.01, "entropy_coefficient": 0.01, "minibatches": 2}
    folder = train(tmp_path / "run", model, ppo, policy=policy_section(model, critic=critic))
    assert_trained(folder, model, lora=False)


@every_model
def test_the_other_verbs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check, eval and generate, on a recipe and on a run with adapters."""
    changes = SHORT | {"policy": policy_section(model, **LORA), "algorithm": "a2c"}
    recipe = runs.write(tmp_path / "recipe.yaml", **changes)
    assert main(["check", str(recipe)]) in (0, 1)
    assert "trained, cpu" in capsys.readouterr().out
    folder = train(tmp_path / "run", model, {"name": "a2c"}, policy=policy_section(model, **LORA))
    assert main(["eval", str(folder)]) == 0
    assert main(["generate", str(folder), "--prompt", "1+1="]) == 0
