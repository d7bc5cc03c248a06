"""Weights of which each rank holds a part: the same gradients as one process, and runs that are equal bit for bit."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sharding import shard_policy
from lmgym.models.skeleton import Skeleton
from lmgym.training.checkpoints import manifest
from tests import runs
from tests.parity.test_resume import ALGORITHMS
from tests.rank_targets import KINDS, ONE_PROCESS_EACH
from tests.ranks import Group, assert_equal_updates, begun, written
from tests.runs import assert_equal_runs

pytestmark = pytest.mark.slow

FSDP = {"distributed": {"sharding": "fsdp"}}
# A reference, so that a frozen copy is shared out too; a checkpoint after each step.
REFERENCE = {
    "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1, "epochs": 2},
    "checkpoint": {"every": 1, "keep": 2},
}


@pytest.fixture(scope="module")
def updates(
    group: Group,
    alone: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, Path]:
    """What `rank_targets.gradients` wrote: one process with whole weights, and ranks with parts."""
    parts = {size: written(group, tmp_path_factory.mktemp(f"parts-{size}"), size, True) for size in (2, 4)}
    return {1: alone, **parts}


@pytest.fixture(scope="module")
def kinds(group: Group, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp
    begun(group, made("begun"), True)
    return {"alone": written(group, made("k"), 1, False, True), "2": written(group, made("k2"), 2, True, True)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ONE_PROCESS_EACH])
def test_gradients_of_all_algorithms(name: str, size: int, updates: dict[int, Path]) -> None:
    assert_equal_updates(name, updates[1], updates[size], size)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_all_kinds_of_models(name: str, kinds: dict[str, Path]) -> None:
    assert_equal_updates(name, kinds["alone"], kinds["2"], 2)


def test_ranks_call_a_head_that_is_no_plain_map_different_numbers_of_times(group: Group, tmp_path: Path) -> None:
    """Phi's head has a bias, Gemma 2's logits are capped: the ranks have put its weights together before the calls."""
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        statuses = group.run(size, str(folder), target="tests.rank_targets:unequal_calls")
        assert statuses == [0] * size, group.said() + group.said(size - 1)
    assert_equal_updates("head", tmp_path / "1", tmp_path / "2", 2)


def launched(group: Group, folder: Path, size: int = 2, **changes: object) -> Path:
    recipe = runs.write(folder.with_suffix(".yaml"), **{**FSDP, **REFERENCE, **changes})
    assert group.run(size, ["train", str(recipe), f"out={folder}"]) == [0] * size, group.said() + group.said(1)
    return folder


def test_a_killed_run_ends_like_one_that_nobody_touched(group: Group, tmp_path: Path) -> None:
    """Each rank reads its part of weights, moments and reference from the checkpoint."""
    whole, folder = launched(group, tmp_path / "whole", steps=8), tmp_path / "killed"
    group.start(2, ["train", str(tmp_path / "whole.yaml"), f"out={folder}"])
    while not [*folder.glob("checkpoints/stage-0-step-00000[2-9]")]:
        time.sleep(0.02)
    os.kill(group.processes[1], signal.SIGKILL)
    assert group.wait() == [75, -9], group.said()
    assert group.run(2, ["train", str(tmp_path / "whole.yaml"), f"out={folder}"]) == [0, 0], group.said()
    assert_equal_runs(whole, folder)


def test_a_rank_that_goes_in_an_exchange_of_weights_is_named(group: Group, tmp_path: Path) -> None:
    """torch's own exchanges raise what any mistake may raise; a mistake is not taken for a lost rank."""
    assert group.run(2, str(tmp_path), target="tests.rank_targets:left_alone") == [0, 9], group.said()
    assert (tmp_path / "said").read_text() == "rank 0: lost the connection to rank 1"


def test_a_checkpoint_is_the_same_model_for_any_number_of_ranks(group: Group, tmp_path: Path) -> None:
    """With learning rate 0 what was loaded is what is saved, by two ranks with a critic of its own, then by one. That
    one finds other weights than the seed's."""
    changes = {"algorithm": {"name": "ppo"}, "optimizer": {"learning_rate": 0.0}, "steps": 1}
    section = {**runs.TINY["policy"], "critic": "separate"}
    folder = launched(group, tmp_path / "run", policy=section, **changes)
    begun = load_policy(PolicySection(**section), seed=0).model.state_dict()

    def assert_holds(step: int, scale: float) -> None:
        for path in ("final", f"checkpoints/stage-0-step-00000{step}", f"checkpoints/stage-0-step-00000{step}/critic"):
            saved = load_file(folder / path / "model.safetensors")
            assert all(torch.equal(saved[name], scale * begun[name]) for name in saved) and len(saved) > 5

    assert_holds(step=1, scale=1.0)
    newest = runs.newest(folder)
    for path in (newest / "model.safetensors", newest / "critic" / "model.safetensors"):
        save_file({name: 2.0 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    manifest.write(newest)
    runs.run(folder, **{**FSDP, **REFERENCE, **changes, "policy": section, "steps": 2})
    assert_holds(step=2, scale=2.0)
    records = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] in ("train", "resume")]
    assert [record["kind"] for record in records] == ["train", "resume", "train"]


def test_adapters_and_bf16(group: Group, tmp_path: Path) -> None:
    """Whole runs: what samples is a whole copy, in the precision of the forward pass; the reference is the base."""
    section = {**runs.TINY["policy"], "lora_rank": 4, "compute": "bfloat16"}
    evaluation = {"every": 1, "examples": 8, "keep_best": "reward"}
    folder = launched(group, tmp_path / "run", policy=section, evaluation=evaluation, steps=2)
    assert (folder / "best/model.safetensors").is_file() and not (folder / "copies").exists()
    [adapters] = (runs.newest(folder)).glob("adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in load_file(adapters).items() if "lora_B" in name)


def test_each_rank_holds_its_part(group: Group, tmp_path: Path) -> None:
    statuses = group.run(2, str(tmp_path), target="tests.rank_targets:parts")
    assert statuses == [0, 0], group.said() + group.said(1)
    held = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    policy = load_policy(PolicySection(**runs.TINY["policy"]))
    parameters = policy.parameters()
    # A first dimension of an odd size leaves one row more to the first rank.
    odd = sum(parameter[0].numel() for parameter in parameters if len(parameter) % 2)
    assert sum(held) == sum(parameter.numel() for parameter in parameters)
    assert held[0] - held[1] == odd


def test_a_skeleton_keeps_ties_and_holds_no_weights() -> None:
    policy = load_policy(PolicySection(**runs.TINY["policy"]))
    skeleton = Skeleton(policy.model)
    assert {parameter.device.type for parameter in skeleton.model.parameters()} == {"meta"}
    copied = skeleton.filled(policy.model)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    ours, theirs = copied.state_dict(), policy.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert copied.lm_head.weight.data_ptr() != policy.model.lm_head.weight.data_ptr()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": {"name": "trpo"}}, "stage 'train' multiplies with the Fisher matrix"),
        ({"policy": {"model": "some/model", "lora_rank": 4, "quantise": "8bit"}}, "packed weights cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=f"distributed.sharding: {said}"):
        build_config(runs.tiny(**{**FSDP, **changes}))


def test_one_process_holds_everything() -> None:
    policy = load_policy(PolicySection(**runs.TINY["policy"]))
    assert shard_policy(policy, ALONE) is policy
