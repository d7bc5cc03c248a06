"""Programs in real containers of Docker and Podman, where they are installed and work (skipped elsewhere). The image is
an empty one: the machine's own programs are mounted into it, so nothing is downloaded."""

import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.program import AgentProgram
from lmgym.envs.vector import InProcess
from tests import runs
from tests.contract.test_agent_program import GAME, PROGRAM, collect_one

pytestmark = [pytest.mark.processes, pytest.mark.slow]

IMAGE = "localhost/lmgym-empty:1"
SYSTEM = [path for path in ("/usr", "/lib", "/lib64", "/bin") if os.path.isdir(path)]


def works(tool: str) -> str:
    """Why a tool cannot be tried here; empty if it can."""
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        for name in ("tmp", "proc", "dev"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
    try:
        made = subprocess.run([tool, "import", "-", IMAGE], input=empty.getvalue(), capture_output=True, timeout=60)
        mounts = [word for path in SYSTEM for word in ("--volume", f"{path}:{path}:ro")]
        command = [tool, "run", "--rm", "--pull", "never", "--network", "host", *mounts, IMAGE, "/bin/true"]
        ran = subprocess.run(command, capture_output=True, timeout=60) if made.returncode == 0 else made
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{tool} cannot be used on this machine: {error}"
    return f"{tool} runs no container on this machine: {ran.stderr.decode()[-200:]}" if ran.returncode else ""


@pytest.fixture(scope="module", params=["docker", "podman"])
def tool(request: pytest.FixtureRequest) -> Iterator[str]:
    if why := works(request.param):
        pytest.skip(why)
    yield request.param
    subprocess.run([request.param, "image", "rm", "--force", IMAGE], capture_output=True, timeout=60)


def own(tool: str) -> list[str]:
    """The containers of lmgym that are there, running or not."""
    listed = subprocess.run([tool, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, timeout=60)
    return [name for name in listed.stdout.split() if name.startswith("lmgym-")]


def boxed(tool: str, **more: Any) -> AgentProgram:
    prefixes = [path for path in (sys.prefix, sys.base_prefix) if not path.startswith("/usr")]
    mounts = [*SYSTEM, *dict.fromkeys(prefixes), str(runs.ROOT / "lmgym"), PROGRAM]
    return AgentProgram(sandbox={tool: IMAGE, "mounts": mounts, "memory_mib": 256, "processes": 64}, **more)


def test_a_program_plays_and_leaves_nothing(tool: str) -> None:
    [episode] = collect_one(boxed(tool, command=[sys.executable, PROGRAM, "talk"]), ["4", "22"], GAME)
    assert not episode.error and episode.score == 0.75
    assert own(tool) == []


def test_what_a_program_writes_is_graded_and_removed(tool: str, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(
        "import os, runpy, sys\n"
        "print(os.getcwd(), file=open('made.txt', 'w'))\n"
        "sys.argv[1:] = ['talk']; runpy.run_path(" + repr(PROGRAM) + ", run_name='__main__')\n"
    )
    (grader := tmp_path / "grader.py").write_text(
        "import json, os\n"
        "right = open('made.txt').read() == '/work\\n' and 'OPENAI_API_KEY' not in os.environ\n"
        "print(json.dumps({'reward': float(right)}))\n"
    )
    env = boxed(tool, command=[sys.executable, str(program)], grader=[sys.executable, str(grader)])
    [episode] = collect_one(env, ["4", "22"], GAME)
    assert not episode.error and episode.score == 1.0


def test_it_does_not_see_other_files(tool: str, tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("hidden")
    look = f"import os, json; print(json.dumps({{'reward': float(not os.path.exists({str(secret)!r}))}}))"
    ask = f"import runpy, sys; sys.argv[1:] = ['talk']; runpy.run_path({PROGRAM!r}, run_name='__main__')"
    env = boxed(tool, command=[sys.executable, "-c", ask], grader=[sys.executable, "-c", look])
    [episode] = collect_one(env, ["4", "22"], GAME)
    assert not episode.error and episode.score == 1.0


def test_a_program_that_takes_too_much_memory_is_killed(tool: str) -> None:
    if os.getuid() and not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        pytest.skip("without root, containers have limits of memory under cgroups 2 only")
    greedy = boxed(tool, command=[sys.executable, "-c", "bytearray(600 << 20)"])
    with pytest.raises(LmgymError, match="exit status 137: it was killed, perhaps for its memory"):
        collect_one(greedy, ["4"], GAME)


def test_an_episode_that_is_given_up_removes_its_container(tool: str) -> None:
    envs = InProcess(lambda: boxed(tool, command=[sys.executable, PROGRAM, "hanging"]))
    envs.begin([(0, GAME, 1)])
    until = time.monotonic() + 60
    while not own(tool) and time.monotonic() < until:
        time.sleep(0.05)
    assert own(tool)
    envs.close()
    while own(tool) and time.monotonic() < until:
        time.sleep(0.05)
    assert own(tool) == []
