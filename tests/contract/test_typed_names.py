"""Type checkers know the public names without their import: the stub and the lazy table are the same, and a typo in a
name or an argument is an error."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmgym
from tests.runs import ROOT

WRONG = """
import lmgym
from lmgym import GRPO

lmgym.trian("quickstart")
GRPO(grup_size=3)
GRPO(group_size="three")
lmgym.load_config("quickstart").stepz
"""


def test_the_stub_has_the_names_of_the_table() -> None:
    tree = ast.parse((ROOT / "lmgym" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [one for one in tree.body if isinstance(one, ast.ImportFrom)]
    named = {name.asname: f"{one.module}".removeprefix("lmgym.") for one in imports for name in one.names}
    assert named == lmgym._HOMES
    assert all(name.name == name.asname for one in imports for name in one.names)  # "as": it is exported


@pytest.mark.slow
@pytest.mark.processes
def test_a_type_checker_knows_every_public_name(tmp_path: Path) -> None:
    """None is Any, and mistakes are told. Run with the project's settings, whose cache `make types` goes on with."""
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text("import lmgym\n" + "".join(f"reveal_type(lmgym.{name})\n" for name in lmgym.__all__))
    wrong.write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(right), str(wrong)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    revealed = re.findall(r'right\.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == len(lmgym.__all__), done.stdout + done.stderr
    assert not [lmgym.__all__[int(line) - 2] for line, kind in revealed if kind == "Any"]
    told = [re.sub(r".*wrong\.py:(\d+): error: .*\[(.*)\]", r"\1 \2", line) for line in done.stdout.splitlines()]
    assert {"5 attr-defined", "6 call-arg", "7 arg-type", "8 attr-defined"} <= set(told), done.stdout
