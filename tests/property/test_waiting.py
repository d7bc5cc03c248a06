"""Threads that wait go to sleep, whichever way lmgym comes into the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmgym.core import waiting
from lmgym.logs.console import Console
from tests import runs


def found(code: str, **variables: str) -> list[str]:
    """What a fresh Python prints that has only these settings for threads that wait."""
    unset = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=unset | variables, capture_output=True, text=True, check=True).stdout.split()


ASK = "import os; from lmgym.core import waiting; print(os.environ.get('GOMP_SPINCOUNT'), waiting.IN_TIME)"


def test_importing_lmgym_is_enough() -> None:
    assert found(f"import lmgym; {ASK}") == ["3000", "True"]


def test_the_users_setting_stays() -> None:
    assert found(f"import lmgym; {ASK}", GOMP_SPINCOUNT="7") == ["7", "True"]
    assert found(f"import lmgym; {ASK}", OMP_WAIT_POLICY="active") == ["None", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has other threads")
def test_too_late_is_known() -> None:
    assert found(f"import torch, lmgym; {ASK}") == ["None", "False"]
    assert found(f"import torch, lmgym; {ASK}", GOMP_SPINCOUNT="7") == ["7", "True"]


def test_a_run_says_that_it_was_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "IN_TIME", False)
    runs.run(tmp_path / "run", Console(), steps=1)
    assert "import lmgym first, or set the environment variable GOMP_SPINCOUNT=3000" in capsys.readouterr().out
