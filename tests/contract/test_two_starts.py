"""One folder, one run: two starts at once, file systems that cannot lock, and user code that changes the directory."""

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.tasks.base import load_task
from lmgym.training.run import lock_folder
from lmgym.types import Example
from tests import runs

SHORT: dict[str, Any] = {"steps": 1, "evaluation": {"every": 0, "examples": 2}, "prompts_per_step": 1}
MEANWHILE: list[dict[str, Any]] = []  # runs that others make while the data of `overtaken` is loaded


def overtaken(split: str) -> list[Example]:
    """A task that takes so long to load that others train meanwhile."""
    while MEANWHILE:
        runs.run(**SHORT | MEANWHILE.pop())
    return list(load_task("arithmetic", split, size=64, test_size=16, validation_size=16, largest=5))


class Sayings(Console):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.warned: list[str] = []

    def warn(self, text: str) -> None:
        self.warned.append(text)


def wanders(texts: list[str], examples: list[Example]) -> list[float]:
    """A reward that leaves the process in another directory."""
    Path("elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")
    return [float(len(text)) for text in texts]


def strayed(split: str) -> list[Example]:
    """A task that leaves the process in another directory."""
    os.chdir("/")
    return overtaken(split)


def test_the_slower_of_two_new_runs_leaves_the_faster_one_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    MEANWHILE.append({"folder": folder, "seed": 1})
    with pytest.raises(LmgymError, match="while this one was loading"):
        runs.run(folder, **SHORT, task="tests.contract.test_two_starts:overtaken")
    assert "seed: 1\n" in (folder / "recipe.yaml").read_text()
    assert runs.state(folder)["step"] == 1
    runs.run(folder, **SHORT, seed=1)  # it is not locked any more


def test_a_folder_is_locked_before_it_is_decided_where_its_run_stands(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", **SHORT, task="tests.contract.test_two_starts:overtaken")
    before = (folder / "final/model.safetensors").read_bytes()
    MEANWHILE.append({"folder": folder, "seed": 1})
    with pytest.raises(LmgymError, match="another process is training in"):
        runs.run(folder, **SHORT, task="tests.contract.test_two_starts:overtaken")
    assert (folder / "final/model.safetensors").read_bytes() == before


def test_who_only_looks_at_the_lock_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer asks for the state of a run, with a shared lock, at the instant in which the run begins."""
    lock_folder(tmp_path / "run", print).close()
    looking = open(tmp_path / "run/.lock")  # noqa: SIM115
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: looking.close())
    lock_folder(tmp_path / "run", print).close()
    assert looking.closed


def test_a_file_system_that_cannot_lock_is_said_and_trained_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", cannot)
    console = Sayings()
    runs.run(tmp_path / "run", console, **SHORT)
    assert [text for text in console.warned if "cannot lock a file" in text and "no other process" in text]
    assert (tmp_path / "run/final/model.safetensors").is_file()


def test_user_code_that_changes_the_directory_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plug-in, a task and a reward that do; data that are streamed, a second stage and a teacher read relative paths
    later, and the recipe keeps these as they were written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strays.py").write_text("import os\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\n")
    for name in ("train", "test"):
        rows = [{"prompt": f"{name} {n}=", "references": [str(n)]} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = load_policy(PolicySection(architecture=runs.ARCHITECTURE, device="cpu"))
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    data = {"name": "jsonl", "path": "train.jsonl", "test_path": "test.jsonl", "streaming": True}
    gkd = {"name": "gkd", "teacher": "model", "group_size": 1}
    stages = [
        {"name": "first", "task": "tests.contract.test_two_starts:strayed", "steps": 1, "prompts_per_step": 1},
        {"name": "second", "task": data, "steps": 2, "prompts_per_step": 1},
        {"name": "third", "task": data, "steps": 1, "prompts_per_step": 1, "algorithm": gkd},
    ]
    rest = {"policy": {"model": "model", "device": "cpu"}, "evaluation": SHORT["evaluation"], "plugins": ["strays.py"]}
    rest |= {"rewards": {"tests.contract.test_two_starts:wanders": {"pool": False}}, "task": None, "steps": None}
    recipe = runs.write(tmp_path / "recipe.yaml", **rest, prompts_per_step=None, stages=stages)
    assert main(["train", str(recipe), "out=here"]) == 0
    said = capsys.readouterr()
    assert "model: here/final" in said.out and "some code has changed the directory" in said.out + said.err
    assert (tmp_path / "here/checkpoints").is_dir() and (tmp_path / "here/summary.json").is_file()
    written = (tmp_path / "here/recipe.yaml").read_text()
    assert "path: train.jsonl" in written and "model: model\n" in written
    assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.name != "elsewhere"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "here", "stages.third.steps=2"]) == 0
