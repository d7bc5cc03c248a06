"""Checkpoints are whole or not there, come back bit for bit, and a damaged one is noticed, whatever the damage."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import save_file

from lmgym.core.errors import LmgymError
from lmgym.inference.vllm.servers import write_weights
from lmgym.models import lora
from lmgym.models.critic import with_critic
from lmgym.models.policy import Policy
from lmgym.training.checkpoints import checkpoint
from lmgym.training.checkpoints.moments import load_optimizer, moments_of
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from tests import models
from tests.failing_calls import FailingCalls

STATE = {
    "stage": 0,
    "step": 3,
    "steps": 20,
    "version": 3,
    "progress": {"best": 0.1},
    "copies": {},
    "records": {"metrics.jsonl": 4, "rollouts.jsonl": 12},
    "mean": 1 / 3,
}


def policy(seed: int = 0) -> Policy:
    return Policy(models.llama(seed), models.tokenizer())


def moved(policy: Policy, section: OptimizerSection | None = None, steps: int = 2) -> Optimizer:
    """An optimizer that has made some steps on random gradients."""
    optimizer = Optimizer(policy.parameters(), section or OptimizerSection(learning_rate=0.01))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in optimizer.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def save(folder: Path, step: int, stage: int = 0) -> Path:
    one = policy()
    return checkpoint.save(
        folder, one, moments_of(moved(one).torch), {}, STATE | {"stage": stage, "step": step}, {"recipe": {}}
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    for step in (9, 10, 11):
        save(folder, step)
    return folder


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    one = policy()
    optimizer = moved(one)
    path = checkpoint.save(tmp_path, one, moments_of(optimizer.torch), {}, STATE, {"recipe": {}})
    assert path.name == "stage-0-step-000003" and checkpoint.damage(path) is None
    assert checkpoint.read_state(path) == {**STATE, "format": checkpoint.FORMAT}
    other = Optimizer(policy().parameters(), OptimizerSection())
    load_optimizer(path, other.torch)
    ours, theirs = optimizer.torch.state_dict()["state"], other.torch.state_dict()["state"]
    assert ours.keys() == theirs.keys() and len(ours) == len(one.parameters())
    for index, entry in ours.items():
        assert all(torch.equal(value, theirs[index][name]) for name, value in entry.items())
        assert float(entry["step"]) == 2 and float(entry["exp_avg"].abs().sum()) > 0


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_every_file_has_the_permissions_that_files_get_here(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        one = with_critic(policy(), separate=False)
        checkpoint.save(tmp_path / "a", one, moments_of(moved(one).torch), {}, STATE, {})
        checkpoint.save_model(tmp_path / "b" / "final", one)
        one.save(tmp_path / "c")
        write_weights(one, tmp_path / "d")
        lora.add_lora(one.model, 2, 4, "all-linear", 0)
        lora.save(one.model, tmp_path / "e")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 3 + 1 + 2 + 1 + 1
    assert {f"{path.name}: {path.stat().st_mode & 0o777:o}" for path in files} == {
        f"{path.name}: {mode:o}" for path in files
    }


def test_moments_come_from_the_checkpoint_and_settings_from_the_recipe(tmp_path: Path) -> None:
    one = policy()
    path = checkpoint.save(tmp_path, one, moments_of(moved(one).torch), {}, STATE, {"recipe": {}})
    section = OptimizerSection(weight_decay=0.25, betas=(0.5, 0.75), epsilon=1e-3)
    other = Optimizer(policy().parameters(), section)
    load_optimizer(path, other.torch)
    assert [group["weight_decay"] for group in other.torch.param_groups] == [0.25, 0.0]
    assert all(group["betas"] == (0.5, 0.75) and group["eps"] == 1e-3 for group in other.torch.param_groups)


@pytest.mark.parametrize("content", [None, b"", b"not tensors", {"x.exp_avg": torch.zeros(1)}])
def test_moments_that_are_none_are_named(content: Any, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "optimizer.safetensors"
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file(content, file)
    with pytest.raises(LmgymError, match=rf"^{file} holds no state of an optimizer \(.*take the checkpoint before it"):
        load_optimizer(path, moved(policy()).torch)


def test_checkpoints_come_in_the_order_of_training(tmp_path: Path) -> None:
    for stage, step in ((1, 0), (0, 1_000_000), (0, 5), (10, 3), (2, 3)):
        (tmp_path / f"stage-{stage}-step-{step:06d}").mkdir()
    (tmp_path / ".saving-stage-9-step-000009").mkdir()
    found = [checkpoint.stage_and_step(path) for path in checkpoint.all_checkpoints(tmp_path)]
    assert found == [(0, 5), (0, 1_000_000), (1, 0), (2, 3), (10, 3)]


def truncate(file: Path, where: float) -> None:
    os.truncate(file, int(where * file.stat().st_size))


def flip(file: Path, where: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 0x10
    file.write_bytes(data)


def delete(file: Path, where: float) -> None:
    file.unlink()


@pytest.mark.slow
@given(
    file=some.sampled_from(
        ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "config.json", "tokenizer.json"]
    ),
    harm=some.sampled_from([truncate, flip, delete]),
    where=some.floats(0, 1, exclude_max=True),
)
def test_any_damage_is_noticed_and_the_one_before_is_taken(
    three: Path, tmp_path_factory: pytest.TempPathFactory, file: str, harm, where: float
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(three, folder, dirs_exist_ok=True)
    harm(folder / "stage-0-step-000011" / file, where)
    latest, complaints = checkpoint.newest(folder)
    assert latest is not None and latest.name == "stage-0-step-000010"
    assert len(complaints) == 1
    assert "stage-0-step-000011 is damaged (" in complaints[0] and "falling back to the one before" in complaints[0]


def odd_folder(path: Path) -> None:
    shutil.copytree(path.parent / "stage-0-step-000011", path)


def odd_file(path: Path) -> None:
    path.write_text("notes")


def broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("make", [odd_folder, odd_file, broken_link])
@pytest.mark.parametrize(
    "name",
    [
        "stage-0-step-000011 (copy)",
        "stage-0-step-x",
        "step_x",
        "stage-0-step-12",
        "stage--1-step-000012",
        "stage-0-step-000012-",
        "stage-0-step-٠٠٠٠١٢",
        "stage-0-step-9999999999999",
    ],
)
def test_what_lies_beside_the_checkpoints_is_named_and_left(three: Path, tmp_path: Path, name: str, make) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    make(folder / name)
    newest, complaints = checkpoint.newest(folder, resumes=True)
    assert newest == folder / "stage-0-step-000011"
    assert complaints == [f"{folder / name} is no checkpoint of this run and is ignored"]
    checkpoint.prune(newest, keep=1)
    assert {path.name for path in folder.iterdir()} == {name, newest.name}


@pytest.mark.parametrize("make", [odd_file, broken_link])
def test_no_checkpoint_behind_the_name_of_one(three: Path, tmp_path: Path, make) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    make(folder / "stage-0-step-000012")
    newest, complaints = checkpoint.newest(folder)
    assert newest == folder / "stage-0-step-000011" and "000012 is no checkpoint" in complaints[0]
    assert save(folder, 12).name == "stage-0-step-000012"  # it gives way to a real one
    assert checkpoint.newest(folder) == (folder / "stage-0-step-000012", [])


def test_a_checkpoint_under_another_name_is_no_checkpoint(three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    shutil.copytree(folder / "stage-0-step-000009", folder / "stage-0-step-000020")
    newest, complaints = checkpoint.newest(folder)
    assert newest == folder / "stage-0-step-000011" and "it is of stage 0, step 9" in complaints[0]


WRONG = {
    "nothing": "{}",
    "a list": "[]",
    "a number": "3",
    "no JSON": "{",
    "bytes": "\udcff",
    "deep": "[" * 100_000,
    "a file without an entry": '{"model.safetensors": null}',
    "an entry of numbers": '{"model.safetensors": [1, 2]}',
    "bytes as text": '{"model.safetensors": {"bytes": "1", "sha256": ""}}',
    "no digest": '{"model.safetensors": {"bytes": 1}}',
    "outside": '{"../stage-0-step-000010/state.json": {"bytes": 1, "sha256": ""}}',
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_manifest_that_is_none_falls_back(three: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    (folder / "stage-0-step-000011" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    newest, complaints = checkpoint.newest(folder)
    assert newest == folder / "stage-0-step-000010"
    assert len(complaints) == 1 and "stage-0-step-000011 is damaged (" in complaints[0]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"])
def test_a_manifest_of_some_of_the_files_falls_back(three: Path, tmp_path: Path, name: str) -> None:
    """Whether the file is there still, or is gone with its entry."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    newest = folder / "stage-0-step-000011"
    entries = json.loads((newest / "manifest.json").read_text())
    del entries[name]
    (newest / "manifest.json").write_text(json.dumps(entries))
    found, complaints = checkpoint.newest(folder)
    assert found == folder / "stage-0-step-000010" and f"{name} is not in its manifest.json" in complaints[0]
    if name in checkpoint.REQUIRED:
        (newest / name).unlink()
        found, complaints = checkpoint.newest(folder)
        assert found == folder / "stage-0-step-000010" and f"{name} is missing" in complaints[0]


def test_hidden_files_in_a_checkpoint_do_no_harm(three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    (folder / "stage-0-step-000011" / ".DS_Store").write_text("a desktop was here")
    assert checkpoint.newest(folder) == (folder / "stage-0-step-000011", [])


def with_copy(folder: Path, step: int, copied: int) -> Path:
    """A checkpoint that refers to a frozen copy, both whole."""
    checkpoint.save_copy(checkpoint.copy_path(folder, 0, "reference", copied), policy(copied))
    state = {**STATE, "step": step, "copies": {"reference": copied}}
    return checkpoint.save(folder / "checkpoints", policy(), {}, {}, state, {})


@pytest.mark.parametrize("harm", [truncate, flip, delete])
def test_a_damaged_frozen_copy_falls_back_to_a_checkpoint_of_another(tmp_path: Path, harm) -> None:
    older, newer = with_copy(tmp_path, 3, copied=0), with_copy(tmp_path, 6, copied=4)
    harm(tmp_path / "copies" / "stage-0-reference-step-000004" / "model.safetensors", 0.5)
    found, complaints = checkpoint.newest(tmp_path / "checkpoints", resumes=True)
    assert found == older and "its frozen copy stage-0-reference-step-000004: model.safetensors" in complaints[0]
    assert checkpoint.newest(tmp_path / "checkpoints") == (newer, [])  # to evaluate it no copy is needed
    shutil.rmtree(tmp_path / "copies")
    with pytest.raises(LmgymError, match=r"every checkpoint .* is damaged \(its frozen copy stage-0-reference"):
        checkpoint.newest(tmp_path / "checkpoints", resumes=True)


def test_where_all_are_damaged_nothing_is_thrown_away(three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(three, folder)
    for path in checkpoint.all_checkpoints(folder):
        truncate(path / "model.safetensors", 0.5)
    with pytest.raises(LmgymError, match=r"every checkpoint in .*run/checkpoints is damaged .*put a whole one back"):
        checkpoint.newest(folder)
    assert checkpoint.newest(tmp_path / "nothing") == (None, [])


def test_a_kill_between_the_two_renames_loses_no_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that is saved again is moved aside first; killed just then, it is moved back."""
    path = save(tmp_path, 3)
    os.replace(path, tmp_path / f".old-{path.name}")
    (tmp_path / f".saving-{path.name}").mkdir()
    assert checkpoint.newest(tmp_path)[0] == tmp_path / f".old-{path.name}"  # who only reads moves nothing
    checkpoint.put_back(tmp_path.parent)
    checkpoint.put_back(tmp_path)
    assert checkpoint.newest(tmp_path) == (path, [])
    save(tmp_path, 3)
    checkpoint.prune(path, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_prune_keeps_the_newest_and_what_the_run_stands_on(three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    (folder / ".saving-stage-0-step-000012").mkdir()
    checkpoint.prune(folder / "stage-0-step-000011", keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["stage-0-step-000010", "stage-0-step-000011"]
    # 11 was damaged, the run fell back to 9 and has saved 10: 11 must not push out what is whole
    checkpoint.prune(folder / "stage-0-step-000010", keep=1)
    assert [path.name for path in folder.iterdir()] == ["stage-0-step-000010"]


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    class Failing(Policy):
        def save(self, folder: Path) -> None:
            super().save(folder)
            raise OSError(28, "No space left on device")

    broken = Failing(models.llama(), models.tokenizer())
    with pytest.raises(LmgymError, match=r"stage-0-step-000003: the disk is full"):
        checkpoint.save(tmp_path, broken, {}, {}, STATE, {"recipe": {}})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_call_of_a_save_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The n-th call that Python makes, for all n; tests/torture/io_faults.py has those of other languages too."""
    one, fault = policy(), FailingCalls(number)
    for owner, name in (
        *((os, name) for name in ("fsync", "replace", "mkdir", "unlink", "rmdir")),
        (Path, "write_text"),
        (checkpoint, "save_file"),
    ):
        monkeypatch.setattr(owner, name, fault.of(getattr(owner, name)))
    sentences = 0
    for n in range(1, 1000):
        folder = tmp_path / str(n) / "checkpoints"
        fault.left = 0
        checkpoint.save(folder, one, {}, {}, STATE | {"mean": 0.0}, {})  # it is saved again, with another mean
        fault.left, before = n, fault.failed
        try:
            checkpoint.prune(checkpoint.save(folder, one, {}, {}, STATE, {}), keep=1)
        except LmgymError as error:
            sentences += 1
            assert "stage-0-step-000003" in str(error)
        if fault.failed == before:  # the save makes fewer calls
            break
        fault.left = 0
        checkpoint.put_back(folder.parent)
        found, complaints = checkpoint.newest(folder, resumes=True)
        assert found == folder / "stage-0-step-000003" and not complaints
        assert checkpoint.read_state(found)["mean"] in (0.0, 1 / 3)
        checkpoint.prune(checkpoint.save(folder, one, {}, {}, STATE, {}), keep=1)
        assert [path.name for path in folder.iterdir()] == [found.name]
        assert checkpoint.read_state(found)["mean"] == 1 / 3
    assert sentences >= 15 and n > sentences


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(LmgymError, match=r"stage-0-step-000003 has format 99.* reads formats 2 and 3; .*update lmgym"):
        checkpoint.read_state(path)
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    with pytest.raises(LmgymError, match=r"stage-0-step-000003 has format 1, and this lmgym reads formats 2 and 3$"):
        checkpoint.read_state(path)


@pytest.mark.parametrize("damage", [{"records": {"metrics.jsonl": "4"}}, {"copies": {"reference": -1}}])
def test_a_state_whose_counts_are_no_counts_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | damage))
    with pytest.raises(LmgymError, match="lacks a part of a checkpoint's state, or has it in another form"):
        checkpoint.read_state(path)


def test_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    checkpoint.write_text(tmp_path / "a.json", "one")
    checkpoint.write_text(tmp_path / "a.json", "zwei, für drei")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "zwei, für drei"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(LmgymError, match=r"gone/a\.json: cannot be written"):
        checkpoint.write_text(tmp_path / "gone" / "a.json", "text")
