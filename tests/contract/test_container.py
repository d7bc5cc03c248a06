"""Programs in containers: what the tools are told, that nothing is left behind, and what is refused. No tool is needed:
another program stands in for it, since what is tested is our command line; the refusals are the real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.program import ENDPOINT, OTHERS, AgentProgram
from lmgym.envs.vector import InProcess
from lmgym.processes import container
from lmgym.processes.container import Container
from tests import runs
from tests.contract.test_agent_program import GAME, PROGRAM, collect_one

pytestmark = pytest.mark.processes


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tools that stand in; the file in which they note what they were told."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in container.TOOLS:
        script = Path(__file__).with_name("standing_in.py").read_text()
        (folder / tool).write_text(f"#!{sys.executable}\n{script}")
        (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path / "notes"))
    container._problem.cache_clear()
    yield tmp_path / "notes"
    container._problem.cache_clear()


def told(notes: Path) -> list[list[str]]:
    return [json.loads(line) for line in notes.read_text().splitlines()]


def played(way: str, tool: str, image: str = "some/image:1", **more: Any) -> Any:
    env = AgentProgram(command=[sys.executable, PROGRAM, way], sandbox={tool: image, **more})
    [episode] = collect_one(env, ["4", "22"], GAME)
    return episode


@pytest.mark.parametrize("tool", ["docker", "podman"])
def test_a_program_in_a_container_is_played_as_without(tool: str, notes: Path) -> None:
    episode = played("talk", tool, memory_mib=512, processes=9, mounts=["lmgym"])
    assert not episode.error and episode.score == 0.75
    looked, ran, removed = told(notes)
    assert looked == [tool, "image", "inspect", "--format", "{{.Id}}", "some/image:1"]
    name = ran[ran.index("--name") + 1]
    assert removed == [tool, "rm", "--force", name]
    folder = ran[3].removesuffix(":/work")
    assert ran[1:3] == ["run", "--volume"] and not Path(folder).exists()
    owner = ["--userns", "keep-id"] if tool == "podman" and os.getuid() else ["--user", f"{os.getuid()}:{os.getgid()}"]
    mounts = [PROGRAM, str(runs.ROOT / "lmgym")]
    if os.path.isfile(sys.executable):
        mounts = [sys.executable, *mounts]
    assert ran[4:] == [
        *("--workdir", "/work", "--name", name, "--rm", "--interactive", "--pull", "never"),
        *("--network", "host", "--memory", "512m", "--memory-swap", "512m", "--pids-limit", "9"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", *owner),
        *(word for path in mounts for word in ("--volume", f"{path}:{path}:ro")),
        *(word for variable in ENDPOINT + OTHERS for word in ("--env", variable)),
        *("some/image:1", sys.executable, PROGRAM, "talk"),
    ]
    # The key is in no argument, which other users of the machine could read.
    assert not any("OPENAI_API_KEY=" in word for word in ran)


def test_a_program_under_apptainer(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "image.sif").touch()
    episode = played("talk", "apptainer", str(tmp_path / "image.sif"))
    assert not episode.error and episode.score == 0.75
    [ran] = told(notes)  # nothing to look up, and nothing to remove
    assert ran[1:3] == ["exec", "--bind"] and ran[3].endswith(":/work")
    assert ran[4:12] == [
        *("--pwd", "/work", "--containall", "--no-privs", "--memory", "2048M", "--pids-limit", "256"),
    ]
    assert ran[-4:] == [str(tmp_path / "image.sif"), sys.executable, PROGRAM, "talk"]


@pytest.mark.parametrize("tool", ["docker", "apptainer"])
def test_a_grader_has_a_container_of_its_own_without_the_policy(tool: str, notes: Path, tmp_path: Path) -> None:
    (image := tmp_path / "image.sif").touch()
    code = (
        f"import json, os; given = [name for name in {[*ENDPOINT, 'LMGYM_SEED']} if name in os.environ]\n"
        "print(json.dumps({'reward': float(given == ['LMGYM_SEED'])}))"
    )
    command = [sys.executable, PROGRAM, "talk"]
    env = AgentProgram(command=command, grader=[sys.executable, "-c", code], sandbox={tool: str(image)})
    [episode] = collect_one(env, ["4", "22"], GAME)
    assert not episode.error and episode.score == 1.0
    one, two = [words for words in told(notes) if words[1] in ("run", "exec")]
    assert one[3] == two[3]  # the same folder
    if tool == "docker":
        given = [[words[at + 1] for at, word in enumerate(words) if word == "--env"] for words in (one, two)]
        assert given == [[*ENDPOINT, *OTHERS], [*OTHERS]]


def removed(notes: Path) -> bool:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if any(one[1] == "rm" for one in told(notes)):
            return True
        time.sleep(0.02)
    return False


def test_an_episode_that_is_given_up_removes_its_container(notes: Path) -> None:
    envs = InProcess(lambda: AgentProgram(command=[sys.executable, PROGRAM, "hanging"], sandbox={"docker": "a"}))
    envs.begin([(0, GAME, 1)])
    assert [one[1] for one in told(notes)] == ["image", "run"]
    envs.close()
    assert removed(notes)


def test_a_killed_run_removes_its_containers(notes: Path) -> None:
    code = (
        "import sys, time; from lmgym.envs.program import AgentProgram; from lmgym.envs.vector import InProcess\n"
        "from lmgym.types import Example\n"
        f"envs = InProcess(lambda: AgentProgram(command=[sys.executable, {PROGRAM!r}, 'hanging'], "
        "sandbox={'podman': 'a'}))\n"
        "envs.begin([(0, Example('a', 'b'), 1)]); print('begun', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=runs.ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"begun\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert removed(notes)


@pytest.mark.parametrize(
    ("sandbox", "sentence"),
    [
        ({}, "needs one of docker, podman, apptainer"),
        ({"docker": "a", "podman": "b"}, "needs one of docker, podman, apptainer"),
        ({"docker": "--privileged"}, "write the name of an image"),
        ({"docker": "a", "memory_mib": 1}, "env.sandbox.memory_mib is 1; it must be at least 16"),
        ({"docker": "a", "mounts": ["/no/such"]}, "'env.sandbox.mounts': there is no file or folder '/no/such'"),
        ({"docker": "a", "network": "none"}, "env.sandbox.network"),
        ({"docker": "absent"}, r"docker cannot run the image 'absent': .* before a run \(docker pull\)"),
        ({"apptainer": "/no/such.sif"}, "there is no image '/no/such.sif'"),
    ],
)
def test_what_is_refused(sandbox: dict[str, Any], sentence: str, notes: Path) -> None:
    with pytest.raises(LmgymError, match=sentence):
        AgentProgram(command=["python", "a.py"], sandbox=sandbox)


def test_a_function_has_no_container(notes: Path) -> None:
    with pytest.raises(LmgymError, match=r"env\.sandbox runs a command"):
        AgentProgram(function="a:b", sandbox={"docker": "a"})


@pytest.mark.parametrize("tool", container.TOOLS)
def test_a_tool_that_is_not_there_is_said(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    container._problem.cache_clear()
    with pytest.raises(LmgymError, match=f"'env.sandbox.{tool}': {tool} is not installed on this machine"):
        AgentProgram(command=["python"], sandbox={tool: "image"})
    container._problem.cache_clear()


def test_podman_is_refused_on_a_mac(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LmgymError, match=r"env\.sandbox\.podman': on a Mac .* does not reach the gateway"):
        Container(podman="some/image:1").check()
    Container(docker="some/image:1").check()
