"""A program in a container of Docker, Podman or Apptainer: the command line that runs it there, and the one that
removes what is left. The image must be on this machine, since nothing is downloaded in the middle of a run.

The container shares this machine's network, where the gateway is on loopback, and sees two things of its files: the
program's new folder, which is /work in it, and what is mounted to be read.

Sources: the reference pages of docker run, podman run and apptainer exec."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from lmgym.core.errors import LmgymError

FOLDER = "/work"
CHECKING = 60.0  # seconds in which a tool must have found an image
# What it is told is known when it starts: $1 is the tool, $2 its verb, $3 the option that mounts; the folder is the
# current one.
STARTING = 'tool=$1 verb=$2 mount=$3; shift 3; exec "$tool" "$verb" "$mount" "$PWD:' + FOLDER + '" "$@"'


@dataclass(frozen=True, kw_only=True)
class Container:
    """Where a program runs, and what it may use. One of `docker`, `podman` (an image by its name) and `apptainer` (a
    file or folder) is given.

    - `memory_mib`, `processes`: the most that the container may have, where the machine's cgroups allow such limits.
    - `mounts`: further files and folders of this machine that the program may read, at their full paths.

    Example: Container(docker="python:3.12", mounts=["tools"])"""

    docker: str = ""
    podman: str = ""
    apptainer: str = ""
    memory_mib: int = 2048
    processes: int = 256
    mounts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = [(tool, image) for tool in TOOLS if (image := getattr(self, tool))]
        if len(given) != 1:
            raise LmgymError(f"env.sandbox needs one of {', '.join(TOOLS)}, such as docker: python:3.12")
        if given[0][1].startswith("-"):
            raise LmgymError(f"key 'env.sandbox.{given[0][0]}' is '{given[0][1]}'; write the name of an image")
        for name, least in (("memory_mib", 16), ("processes", 1)):
            if getattr(self, name) < least:
                raise LmgymError(f"env.sandbox.{name} is {getattr(self, name)}; it must be at least {least}")
        if missing := next((path for path in self.mounts if not os.path.exists(path)), None):
            raise LmgymError(f"key 'env.sandbox.mounts': there is no file or folder '{missing}'")
        if odd := next((path for path in self.mounts if set(os.path.abspath(path)) & set(":,")), None):
            raise LmgymError(f"key 'env.sandbox.mounts': '{odd}' has a colon or a comma in its path; take another")

    @property
    def tool(self) -> str:
        """docker, podman or apptainer."""
        return next(tool for tool in TOOLS if getattr(self, tool))

    @property
    def image(self) -> str:
        """The image; of Apptainer its full path."""
        image: str = getattr(self, self.tool)
        return os.path.abspath(image) if self.apptainer else image

    def check(self) -> None:
        """Raise LmgymError if the tool is not installed, or has no such image here. It is asked once in a process."""
        if problem := _problem(os.getpid(), self.tool, self.image):
            raise LmgymError(f"key 'env.sandbox.{self.tool}': {problem}")

    def command(self, command: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
        """The command line that runs a command in a new container, in the current folder, with the variables of these
        names; and the one that removes the container if it is still there (empty for Apptainer, whose containers are
        processes and no more). Arguments that are files are mounted, and given by their full path.

        Example: Container(docker="python:3.12").command(["python", "-c", "1"], ["HOME"])[1][:3]
        -> ["docker", "rm", "--force"]"""
        full = [os.path.abspath(word) if os.path.isfile(word) else word for word in command]
        files = [new for old, new in zip(command, full, strict=True) if os.path.isfile(old)]
        mounts = dict.fromkeys([*files, *map(os.path.abspath, self.mounts)])
        start = ["sh", "-c", STARTING, "sh", self.tool]
        if self.apptainer:
            limits = ["--memory", f"{self.memory_mib}M", "--pids-limit", str(self.processes)]
            binds = [word for path in mounts for word in ("--bind", f"{path}:{path}:ro")]
            options = ["--pwd", FOLDER, "--containall", "--no-privs", *limits, *binds]
            return [*start, "exec", "--bind", *options, self.image, *full], []
        name = f"lmgym-{secrets.token_hex(8)}"
        memory = f"{self.memory_mib}m"
        options = [
            *("--workdir", FOLDER, "--name", name, "--rm", "--interactive", "--pull", "never"),
            *("--network", "host", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(self.processes)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *self._owner(),
            *(word for path in mounts for word in ("--volume", f"{path}:{path}:ro")),
            *(word for own in names for word in ("--env", own)),  # values are no arguments, which others can read
        ]
        return [*start, "run", "--volume", *options, self.image, *full], [self.tool, "rm", "--force", name]

    def _owner(self) -> tuple[str, str]:
        """As whom the program runs, so that its files can be removed by who runs this. Podman without root has numbers
        of its own for users; with root it knows no keep-id."""
        if self.podman and os.getuid():
            return "--userns", "keep-id"
        return "--user", f"{os.getuid()}:{os.getgid()}"

    def variables(self, given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
        """The variables of the tool's own process, from which it takes those of these names for the program."""
        return {
            **given,
            **{own: given[name] for own, name in zip(self.names(names), names, strict=True) if name in given},
        }

    def names(self, names: Sequence[str]) -> tuple[str, ...]:
        """What these variables of the program are called for the tool's own process."""
        return tuple(f"APPTAINERENV_{name}" if self.apptainer else name for name in names)


TOOLS = ("docker", "podman", "apptainer")


@cache
def _problem(process: int, tool: str, image: str) -> str:
    """Why an image cannot be used; empty if it can."""
    if shutil.which(tool) is None:
        return f"{tool} is not installed on this machine (there is no program of this name); leave env.sandbox out"
    if tool == "apptainer":
        return "" if os.path.exists(image) else f"there is no image '{image}'; build it first (apptainer build)"
    if tool == "podman" and sys.platform == "darwin":
        return (
            "on a Mac it runs containers in a virtual machine, which does not reach the gateway on this machine's "
            "loopback; use Docker Desktop with host networking (docs/agents.md), or leave env.sandbox out"
        )
    try:
        asked = [tool, "image", "inspect", "--format", "{{.Id}}", image]
        found = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=CHECKING)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{tool} does not answer: {error}"
    if found.returncode == 0:
        return ""
    said = found.stderr.strip().rpartition("\n")[2][:300] or "it says nothing more"
    return f"{tool} cannot run the image '{image}': {said}; the image must be here before a run ({tool} pull)"
