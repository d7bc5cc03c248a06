"""The Tab key: what real shells offer for the beginning of a command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

pytest.importorskip("argcomplete")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

# The beginning of a line, what is offered for its last word, and what is not.
LINES = [
    ("lmgym tr", ["train"], ["trace"]),
    ("lmgym train qui", ["quickstart"], []),
    ("lmgym compare qui", ["quickstart"], []),
    ("lmgym train quickstart --r", ["--ranks", "--restarts"], ["--on"]),
    ("lmgym train quickstart opt", ["optimizer=", "optimizer.learning_rate="], ["steps="]),
    ("lmgym train quickstart stages.rl.optimizer.l", ["stages.rl.optimizer.learning_rate="], []),
    ("lmgym train quickstart stages.rl.algorithm.gr", ["stages.rl.algorithm.group_size="], []),
    ("lmgym train sums algorithm=gsp", ["gspo", "gspo_token"], ["grpo"]),
    ("lmgym train sums policy.compute=", ["auto", "bfloat16", "float32"], []),
    ("lmgym train sums shuffle=", ["true", "false"], []),
    ("lmgym train my_rec", ["my_recipe.yaml"], []),
    ("lmgym train my_recipe.yaml stages.first.st", ["stages.first.steps="], ["stages.second.steps="]),
    ("lmgym train absent.yaml stage", ["stages="], []),
    ("lmgym list rew", ["reward"], []),
    ("lmgym recipes gsm8k_g", ["gsm8k_grpo"], ["gsm8k_dapo"]),
    ("lmgym completion ", ["bash", "zsh", "fish"], []),
]

BASH = """
eval "$(lmgym completion bash)"
while IFS= read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
  _python_argcomplete lmgym "" ""
  printf '%s\\t' "${COMPREPLY[@]}"; echo
done
"""
FISH = """
lmgym completion fish | source
while read -l line; complete -C "$line" | string join \\t; end
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe, and with the command `lmgym` in bin/."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "lmgym"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lmgym "$@"\n')
    command.chmod(0o755)
    runs.write(tmp_path / "my_recipe.yaml", stages=[{"name": "first"}])
    return tmp_path


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH)])
def test_a_shell_offers_what_may_stand_there(shell: str, script: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(map(str, (runs.ROOT, *sys.path)))}
    lines = "".join(f"{line}\n" for line, _, _ in LINES)
    done = subprocess.run(
        [shell, "-c", script], input=lines, cwd=folder, env=environment, capture_output=True, text=True
    )
    answers = done.stdout.splitlines()
    assert len(answers) == len(LINES), done.stderr
    for (line, offered, others), answer in zip(LINES, answers, strict=True):
        words = [word.strip() for word in answer.split("\t")]
        if shell == "fish":  # which offers the whole word, and bash what is behind the =
            words = [word.rpartition("=")[2] or word for word in words]
        assert {*offered} <= {*words}, line
        assert not {*others} & {*words}, line


def test_zsh_takes_the_function(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmgym", "completion", "zsh"], capture_output=True, text=True, check=True
    )
    assert "compdef" in done.stdout
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n"], input=done.stdout, text=True, check=True)


def test_completion_imports_nothing_heavy(folder: Path) -> None:
    """A Tab may not take seconds."""
    probe = (
        "import argparse, sys; from lmgym.cli.completion import offered; action = argparse.Action([], 'overrides'); "
        "assert offered('stages.rl.alg', action, argparse.Namespace(what='quickstart')); "
        "assert not {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", probe], cwd=runs.ROOT, check=True)
