"""`policy.memory_gib`: what is chosen for a budget, that it stays chosen, and what is said where it cannot be kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.doctor.examine import examine
from lmgym.models import device
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.shapes import shapes_of
from lmgym.training.loop import train
from lmgym.training.machine import Machine
from lmgym.training.planning.memory import estimate, resident_bytes
from lmgym.training.planning.memory_plan import choices, within_memory
from lmgym.training.setup import load_data
from tests import runs

GIB = 2**30
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}  # 270M parameters, never loaded
STEP = {"prompts_per_step": 8, "algorithm": {"name": "grpo", "group_size": 8}, "sampling": {"max_new_tokens": 200}}


def large(**policy: Any) -> Config:
    own = {"model": "builtin:tiny", "device": "cpu", "compute": "float32", "architecture": LARGE, **policy}
    return build_config({**runs.TINY, **STEP, "policy": own})


def chosen(config: Config) -> Machine:
    return within_memory(config, load_data(config).training, byte_tokenizer(), Machine(threads=1))


def peak(config: Config, machine: Machine, prompt: int) -> float:
    own = replace(config, policy=machine.policy_section(config.policy), engine=machine.engine_section(config.engine))
    return estimate(own, config.stages[0], shapes_of(config.policy), prompt, process=resident_bytes()).peak


def test_the_fastest_choice_below_the_budget_is_taken() -> None:
    """It lies below, every faster one above; and less memory never buys a faster choice."""
    config = large()
    prompt = max(len(byte_tokenizer()(str(one.prompt)).input_ids) for one in load_data(config).training[0][:64])
    places = []
    process = resident_bytes() / GIB  # other tests of this process leave it larger than a run would find it
    for budget in (process + beside for beside in (64.0, 7.6, 6.9, 6.0, 5.2, 4.6)):
        config = large(memory_gib=budget)
        machine = chosen(config)
        tried = list(choices(config, Machine(threads=1, memory_gib=budget), "cpu"))
        places.append(tried.index(machine))
        margin = 2**26  # what this process has allocated since then
        assert peak(config, machine, prompt) <= budget * GIB + margin
        assert all(peak(config, other, prompt) > budget * GIB - margin for other in tried[: places[-1]])
    assert places[0] == 0 and places == sorted(places) and len(set(places)) >= 3


def test_a_budget_that_nothing_keeps_is_refused_with_what_the_least_would_be() -> None:
    with pytest.raises(
        LmgymError, match=r"policy.memory_gib is 2: the least .* is \d\.\d\d GiB, .* are held all the time"
    ):
        chosen(large(memory_gib=2))
    with pytest.raises(LmgymError, match=r"memory_gib"):
        large(memory_gib=0)


def test_what_the_recipe_names_is_not_exceeded() -> None:
    machine = chosen(large(memory_gib=64, tokens_per_forward=300, activation_checkpointing=True))
    assert (machine.tokens_per_forward, machine.activation_checkpointing) == (300, True)


def test_given_answers_are_counted_as_long_as_they_are() -> None:
    """References of a few characters keep a budget that answers of `max_new_tokens` would not."""
    tree = {**runs.TINY, "algorithm": "supervised", "prompts_per_step": 8}
    del tree["rewards"]
    policy = {"model": "builtin:tiny", "device": "cpu", "compute": "float32", "architecture": LARGE}
    tree["policy"] = {**policy, "memory_gib": resident_bytes() / GIB + 7}
    choice, other = (chosen(build_config({**tree, "sampling": {"max_new_tokens": length}})) for length in (8, 400))
    assert choice == other and (choice.tokens_per_forward, choice.rows) == (4096, 256)


def test_a_resumed_run_keeps_the_choice_and_another_budget_chooses_anew(tmp_path: Path) -> None:
    tree = {**runs.TINY, "out": str(tmp_path / "run"), "steps": 2}
    tree["policy"] = {**runs.TINY["policy"], "memory_gib": 32.0}
    whole = train(build_config({**tree, "out": str(tmp_path / "whole"), "steps": 4}), Console(quiet=True))
    train(build_config(tree), Console(quiet=True))
    path = tmp_path / "run" / "machine.json"
    first = json.loads(path.read_text())
    assert (first["memory_gib"], first["rows"]) == (32.0, 256)
    path.write_text(json.dumps({**first, "tokens_per_forward": first["tokens_per_forward"] // 2}))
    train(build_config({**tree, "steps": 3}), Console(quiet=True))
    assert json.loads(path.read_text())["tokens_per_forward"] == first["tokens_per_forward"] // 2  # not chosen anew
    tree["policy"] = {**tree["policy"], "memory_gib": 33.0}
    resumed = train(build_config({**tree, "steps": 4}), Console(quiet=True))
    assert json.loads(path.read_text())["tokens_per_forward"] == first["tokens_per_forward"]
    one, other = (load_file(folder / "final" / "model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)  # a step fits into one pass either way


@pytest.mark.parametrize("damage", [{"rows": None}, {"rows": 0}, {"tokens_per_forward": "x"}, {"memory_gib": "4"}])
def test_a_damaged_choice_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    tree = {**runs.TINY, "out": str(tmp_path / "run"), "steps": 1}
    tree["policy"] = {**runs.TINY["policy"], "memory_gib": 32.0}
    train(build_config(tree), Console(quiet=True))
    path = tmp_path / "run" / "machine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(LmgymError, match=r"machine.json is damaged"):
        train(build_config({**tree, "steps": 2}), Console(quiet=True))


def test_the_doctor_names_a_run_that_takes_more_than_its_budget(tmp_path: Path) -> None:
    """The process has once held more than the run may: its peak stays."""
    torch.ones(2**28)  # 1 GiB
    tree = {**runs.TINY, "out": str(tmp_path / "run"), "steps": 2}
    tree["policy"] = {**runs.TINY["policy"], "memory_gib": resident_bytes() / GIB + 0.4}
    train(build_config(tree), Console(quiet=True))
    findings = examine(tmp_path / "run", read_yaml(tmp_path / "run" / "recipe.yaml")).findings
    found = {finding.rule: finding.sign for finding in findings}
    assert found["memory_budget"].value > found["memory_budget"].limit


def test_the_limits_of_control_groups_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert device.memory_limits(tmp_path) == []  # not Linux
    # Version 2: a job of SLURM, whose step has no limit of its own.
    write("proc/self/cgroup", "0::/system.slice/job_1/step_0\n")
    write("sys/fs/cgroup/system.slice/job_1/step_0/memory.max", "max\n")
    write("sys/fs/cgroup/system.slice/job_1/memory.max", "8589934592\n")
    assert device.memory_limits(tmp_path) == [2**33]
    # Version 1: a container that finds its group at the top, under the name that it has outside.
    write("proc/self/cgroup", "4:cpu,memory:/docker/4f\n3:cpuset:/docker/4f\n0::/\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n")
    assert device.memory_limits(tmp_path) == [2**32]
    # The smallest one counts.
    usual = device.memory_here("cpu")
    assert usual is not None
    monkeypatch.setattr(device, "memory_limits", lambda: [2**62, usual // 2])
    assert device.memory_here("cpu") == usual // 2
