"""What a process brings along when it trains: threads, torch's global settings, closed standard files."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.core.errors import LmgymError
from lmgym.types import Example
from tests import runs
from tests.contract.test_two_starts import SHORT, Sayings


@pytest.fixture(autouse=True)
def put_back() -> Any:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_device(None)  # type: ignore[arg-type]
    torch.set_grad_enabled(True)


def meddles(texts: list[str], examples: list[Example]) -> list[float]:
    """A reward that changes the number of threads for the whole process."""
    torch.set_num_threads(2)
    return [float(len(text)) for text in texts]


def switches_off(texts: list[str], examples: list[Example]) -> list[float]:
    """A reward that switches gradients off, and sets another default device."""
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    return [float(len(text)) for text in texts]


def elsewhere() -> Any:
    torch.set_default_device("meta")
    return nullcontext()


def with_default(dtype: torch.dtype) -> Callable[[], Any]:
    def act() -> Any:
        torch.set_default_dtype(dtype)
        return nullcontext()

    return act


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (torch.no_grad, "gradients are switched off"),
        (torch.inference_mode, "gradients are switched off"),
        (with_default(torch.float64), "torch's default type is float64"),
        (elsewhere, "torch's default device is meta"),
    ],
)
def test_what_nothing_can_be_trained_in_is_refused(around: Callable[[], Any], said: str, tmp_path: Path) -> None:
    with around(), pytest.raises(LmgymError, match=said):
        runs.run(tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_settings_that_user_code_changes_are_set_back_and_said(tmp_path: Path) -> None:
    changes = SHORT | {"rewards": {"tests.contract.test_process_state:meddles": {"pool": False}}}
    console = Sayings()
    runs.run(tmp_path / "run", console, **changes)
    [said] = {text for text in console.warned if "torch's settings" in text}
    assert "from 1 threads" in said and "to 2 threads" in said


def test_gradients_and_device_that_user_code_changes_are_set_back(tmp_path: Path) -> None:
    console = Sayings()
    rewards = {"tests.contract.test_process_state:switches_off": {"pool": False}}
    folder = runs.run(tmp_path / "run", console, **SHORT | {"rewards": rewards})
    assert (folder / "summary.json").is_file()
    [said] = {text for text in console.warned if "torch's settings" in text}
    assert "device cpu, gradients on" in said and "device meta, gradients off" in said


def test_other_settings_at_a_resume_are_said_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.run(tmp_path / "run", **SHORT)
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    runs.run(folder, **SHORT | {"steps": 2})
    [record] = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "resume"]
    assert "float32_matmul_precision was not there and is medium" in record["changed"]
    assert "MKL_CBWR was not there and is COMPATIBLE" in record["changed"]


@pytest.mark.slow
def test_runs_in_threads_begin_with_the_weights_of_their_seeds(tmp_path: Path) -> None:
    def train(name: str, seed: int) -> bytes:
        folder = runs.run(tmp_path / f"{name}-{seed}", **SHORT | {"seed": seed})
        return (folder / "final/model.safetensors").read_bytes()

    seeds = range(6)
    alone = [train("alone", seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        together = [*pool.map(lambda seed: train("together", seed), seeds)]
    assert alone == together and len({*alone}) == len(seeds)


def test_whoever_borrows_torchs_generator_holds_the_lock() -> None:
    """Else two threads put each other's random numbers back. (`load_policy` holds it around all that it calls.)"""
    package = runs.ROOT / "lmgym"
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    borrowing = {
        name: [line for line in text.splitlines() if " torch.random.fork_rng(" in line]
        for name, text in sources.items()
    }
    holding = {"rewards/learned/scorers.py", "inference/vllm/here.py", "models/seeded.py"}
    assert {name for name, lines in borrowing.items() if lines} == {*holding, "models/load.py"}
    assert all("seeds.GLOBAL" in line for name in holding for line in borrowing[name])


@pytest.mark.slow
@pytest.mark.processes
def test_rewards_in_processes_need_no_standard_error() -> None:
    program = (
        "import os, sys\n"
        "report = os.dup(1)\n"
        "os.close(0); os.close(1); os.close(2)\n"
        "from lmgym.processes.pool import shared\n"
        "os.write(report, str(shared('math:factorial').map([5], seconds=30.0)).encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=runs.ROOT)
    assert done.stdout == "[120]"
