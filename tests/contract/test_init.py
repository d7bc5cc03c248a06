"""`lmgym init` writes a project that trains and whose own tests pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmgym.cli.main import main
from tests import runs
from tests.runs import complaint

FILES = ("recipe.yaml", "task.py", "reward.py", "test_project.py", "README.md")
# Both commands that `lmgym init` names, in one process, which imports torch once.
COMMANDS = """
import sys, pytest
from lmgym.cli.main import main
sys.exit(main(["train", "recipe.yaml", *sys.argv[1:]]) or pytest.main(["-q", "-p", "no:cacheprovider"]))
"""
SMALL = ["stages.warm_start.steps=2", "stages.rl.steps=2", "stages.rl.prompts_per_step=4", "evaluation.examples=4"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_new_project_trains_and_passes_its_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "deep" / "my project"
    assert main(["init", str(project)]) == 0
    said = capsys.readouterr().out
    assert f"cd '{project}'" in said and "lmgym train recipe.yaml" in said
    assert {path.name for path in project.iterdir()} == set(FILES)
    assert (project / "README.md").read_text().startswith("# my project\n")

    environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    command = [sys.executable, "-c", COMMANDS, *SMALL]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert (project / "runs" / "recipe" / "final" / "model.safetensors").is_file()


def test_an_empty_folder_will_do_and_one_with_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path)]) == 0
    (tmp_path / "task.py").write_text("mine")
    assert complaint(capsys, "init", tmp_path) == f"{tmp_path} is not empty; name a new folder, such as {tmp_path}-2"
    assert (tmp_path / "task.py").read_text() == "mine"


def test_what_cannot_be_a_folder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written: File exists" in complaint(capsys, "init", tmp_path / "file")
    assert "cannot be written: Not a directory" in complaint(capsys, "init", tmp_path / "file" / "inside")
