"""The tool `python`: runs a model's Python code (a snippet) in a separate process, within limits.

Layers of protection (Linux; `protection()` tells which of the named ones this machine has):

- limits (every Unix): processor time, time by the clock, address space (Linux), size and number of files, no further
  process, no core dump; a fresh interpreter without site-packages and environment variables. Afterwards its processes
  are killed and its files deleted. The limit on processes has no effect on root.
- "files" (Landlock, Linux 5.13): the process can open only its own folder, the standard library and system libraries,
  but none of the packages that are installed beside these. It can still ask whether a file of a given name exists.
- "system calls" (seccomp): no new processes or threads, no programs, sockets, signals or mounts, no changes of owners
  or permissions; the process has no capabilities, even as root.
- "network and folder" (namespaces): no network device; the folder is a file system in memory of limited size. Without
  this layer the folder is an ordinary one: each file is limited in size, but not the number of files.
- an audit hook: turns refusals into clear messages. It is no protection: Python code can get round it on purpose.

None of this protects against bugs of the kernel or side channels of the processor. If a hostile person may influence
the text of the model, run the whole training in a container or a virtual machine as well."""

import math
import os
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.envs.tools.schema import cut

SCRIPT = Path(__file__).with_name("snippet_process.py")
NOT_ISOLATED = 117  # as in snippet_process.py
LAYERS = ("network and folder", "files", "system calls")  # as in snippet_process.py
ATTEMPTS = 3  # somebody may kill the process that finds out what holds here; the machine is then none the worse
SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
    "/dev/null", "/dev/urandom",
)  # fmt: skip
# Folders of installed packages, in a folder of libraries or in a standard library.
PACKAGES = ("site-packages", "dist-packages", "python*/site-packages", "python*/dist-packages")


@dataclass(frozen=True)
class Limits:
    """What a snippet may use.

    `seconds` of processor time, `wall_seconds` by the clock (start-up included), `memory_mib` of address space (an
    empty interpreter takes 50), `folder_mib` of files, `max_source` characters of code, `max_output` characters of
    output. With `isolation: kernel` the tool works only if the kernel enforces "files" and "system calls"; `process`
    works without them, with the other layers.

    Example: Limits(seconds=2.0, memory_mib=256)"""

    seconds: float = 5.0
    wall_seconds: float = 20.0
    memory_mib: int = 512
    folder_mib: int = 16
    max_source: int = 50_000
    max_output: int = 4_000
    isolation: Literal["kernel", "process"] = "kernel"

    def __post_init__(self) -> None:
        least = {"seconds": 0.01, "wall_seconds": 0.1, "memory_mib": 64, "folder_mib": 1, "max_source": 1}
        for name, bound in {**least, "max_output": 100}.items():
            value = getattr(self, name)
            if not (value >= bound and math.isfinite(value)):
                raise LmgymError(f"the limit '{name}' of python snippets must be at least {bound:g}, not {value}")


@register("tool", "python")
def python(code: str) -> str:
    """Runs Python code and returns what it prints, then the value of its last line if that is an expression. Each call
    starts anew: no variable and no file is kept, and there is no network and no package beyond the standard library.

    Args:
        code: the source, one or more lines"""
    return run(code, Limits())


def python_within(limits: Limits) -> Callable[[str], str]:
    """The tool `python` with these limits. Raises LmgymError if the machine lacks the isolation that they ask for."""
    require(limits)

    def python(code: str) -> str:
        return run(code, limits)

    python.__doc__ = globals()["python"].__doc__
    return python


def require(limits: Limits) -> None:
    """Raise LmgymError if the limits ask for isolation by the kernel and the kernel has none."""
    missing = [name for name in ("files", "system calls") if not protection()[name]]
    if limits.isolation == "kernel" and missing:
        raise LmgymError(
            f"the tool 'python' cannot be isolated on this machine: the kernel enforces no limits on "
            f"{' and '.join(missing)} (Linux 5.13 with Landlock and seccomp does); run in a container of your own and "
            "say `isolation: process`, or leave the tool out"
        )


@cache
def protection() -> dict[str, bool]:
    """Which layers the kernel enforces here (see the top of this file); starts one process to find out.

    Example: protection() -> {'network and folder': True, 'files': True, 'system calls': True}"""
    output, why = b"", ""
    for _ in range(ATTEMPTS):
        output, why = _process("", Limits(isolation="process"), report=True)
        if not why:
            holding = output.decode().splitlines()
            return {layer: layer in holding for layer in LAYERS}
    raise LmgymError(f"a process for python snippets cannot start here: {why}: {output[-300:]!r}")


def run(source: str, limits: Limits) -> str:
    """Run a snippet. Returns what it prints, then the value of its last expression or the last line of its error, in
    at most `max_output` characters. The snippet cannot make it raise.

    Trust the output no more than any text of the model. The folder of the snippet is deleted.

    Example: run("x = 6\\nprint('so')\\nx * 7", Limits()) -> 'so\\n42'"""
    if len(source) > limits.max_source:
        return f"error: the code has {len(source)} characters; at most {limits.max_source} are run"
    output, why = _process(source, limits)
    text = output.decode("utf-8", "replace").rstrip("\n")
    if why:
        text = f"{text}\nerror: {why}".lstrip("\n")
    return cut(text or "(no output)", limits.max_output)


def _process(source: str, limits: Limits, report: bool = False) -> tuple[bytes, str]:
    """Start the interpreter, read its output, kill it and delete its folder. Returns the output, and why the snippet
    failed (empty if it did not)."""
    folder = tempfile.mkdtemp(prefix="lmgym-snippet-")
    mode = "report" if report else limits.isolation
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python may need it
    numbers = [str(number) for number in (limits.seconds, limits.memory_mib, limits.folder_mib)]
    try:
        with tempfile.TemporaryFile() as file:
            file.write(source.encode("utf-8", "surrogatepass"))
            file.seek(0)
            # -P -s -S and an empty environment do what -I -S does, but keep PYTHONHASHSEED (same order of sets).
            options = ["-P", "-s", "-S", "-B", "-X", "utf8"]
            process = subprocess.Popen(
                [sys.executable, *options, str(SCRIPT), mode, folder, *map("\n".join, readable()), *numbers],
                cwd=folder,
                env={"PYTHONHASHSEED": "0", **kept},
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            output, late = _output(process, limits.wall_seconds, 8 * limits.max_output)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children; the number is not reused before `wait`
            code = process.wait()
            assert process.stdout is not None
            process.stdout.close()
    finally:
        _delete(folder)
    output = output.replace(os.fsencode(folder), b"/tmp/snippet")  # the real name differs in each call
    return output, f"it did not finish within {limits.wall_seconds:g} s" if late else _reason(code, limits)


def _output(process: subprocess.Popen[bytes], seconds: float, most: int) -> tuple[bytes, bool]:
    """The first and the last `most` bytes of its output, and True if it did not end in time."""
    assert process.stdout is not None
    deadline, output = time.monotonic() + seconds, bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(min(left, 0.2)):
                if _ended(process):  # and a child of it keeps the output open
                    break
                continue
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                break
            output += piece
            if len(output) > 4 * most:
                del output[most:-most]
    while not _ended(process):  # it may have closed its output without ending
        if time.monotonic() >= deadline:
            return bytes(output), True
        time.sleep(0.001)
    return bytes(output), False


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """True if the process has ended. Does not free its number, if the system has `waitid`."""
    if hasattr(os, "waitid"):
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has waited for it
            return True
    return process.poll() is not None


def _reason(code: int, limits: Limits) -> str:
    """The reason that follows from the exit status; empty if the output says enough."""
    if code == NOT_ISOLATED:
        return "the snippet was not run, since it could not be isolated"
    if -code in (signal.SIGPROF, signal.SIGXCPU):
        return f"it took more than {limits.seconds:g} s of processor time"
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    return f"its process ended with status {code}" if code > 1 else ""


@cache
def readable() -> tuple[list[str], list[str]]:
    """Paths that a snippet may read besides its folder, the standard library and the libraries that it links to; and
    the folders of installed packages in them, which it may not read."""
    base = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    base["installed_platbase"] = sys.base_exec_prefix
    python = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]  # not those of a venv
    libraries = [str(Path(prefix) / "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    roots = list(dict.fromkeys(os.path.realpath(p) for p in (*python, *libraries, *SYSTEM) if Path(p).exists()))
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    packages += [str(path) for root in roots for place in PACKAGES for path in Path(root).glob(place)]
    return roots, list(dict.fromkeys(os.path.realpath(path) for path in packages if Path(path).is_dir()))


def _delete(folder: str) -> None:
    """Remove the folder, even if a snippet took away permissions or nested it deeper than Python can remove."""
    with suppress(OSError):
        os.rmdir(folder)  # enough in most cases: the files were in memory
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
