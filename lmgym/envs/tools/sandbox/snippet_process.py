"""The script that runner.py starts: a fresh interpreter that gives up its rights, then runs one snippet.

It runs without lmgym and site-packages. It imports snippet_kernel.py, which is in the same folder, and as little of the
standard library as it can, since imports take most of the time of a call."""

import _signal as signal  # without the enumerations of the module above it
import builtins
import os
import resource
import sys
from _ast import Expr, Expression, PyCF_ONLY_AST  # `import ast` takes longer than most snippets
from collections.abc import Callable
from typing import Any

NOT_ISOLATED = 117  # exit status: the kernel cannot isolate the process, so nothing was run
REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
    "os.startfile", "os.chmod", "os.chown", "os.lchown", "os.chflags", "os.setxattr", "os.removexattr", "os.utime",
    "os.link", "os.symlink", "os.lockf", "pty.", "signal.pthread_kill", "resource.", "fcntl.", "syslog.",
    "sys.addaudithook", "sys._current_frames", "gc.get_", "webbrowser.", "urllib.", "_posixsubprocess", "msvcrt.",
    "winreg.", "_winapi.",
)  # fmt: skip
READING = ("os.listdir", "os.scandir", "os.chdir")
WRITING = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "sqlite3.connect")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Read the request of runner.py, isolate this process, run the snippet and print its result."""
    mode, folder, readable, hidden, *numbers = sys.argv[1:]
    paths = readable.splitlines(), hidden.splitlines()
    seconds, memory_mib, folder_mib = float(numbers[0]), int(numbers[1]), int(numbers[2])
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the snippet reads an empty standard input
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "random" in source:
        import random

        random.seed(0)  # the same episode gives the same tokens
    # The hook comes last: it would refuse what `isolate` does.
    layers = isolate(folder, *paths, seconds, memory_mib, folder_mib)
    if mode == "report":
        print(*(name for name, holds in layers.items() if holds), sep="\n", flush=True)
        os._exit(0)
    if mode == "kernel" and not (layers["files"] and layers["system calls"]):
        os._exit(NOT_ISOLATED)
    sys.addaudithook(auditor(folder, *paths))
    os._exit(execute(source))


def isolate(
    folder: str, readable: list[str], hidden: list[str], seconds: float, memory_mib: int, folder_mib: int
) -> dict[str, bool]:
    """Set the limits and ask the kernel for its protection. Returns which layers the kernel enforces."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    try:
        import snippet_kernel as kernel
    except ImportError:  # a Python without ctypes
        kernel = None  # type: ignore[assignment]
    sys.path.remove(here)
    # A folder with a hidden one in it cannot be listed any more, and imports look into lists: they are made now.
    for finder in sys.meta_path:
        finder.find_spec("no_such_module", None)
    layers = {"network and folder": False, "files": False, "system calls": False}
    if kernel:
        kernel.die_with_parent()
        layers["network and folder"] = kernel.namespaces(folder, folder_mib)
    limit(seconds, memory_mib, folder_mib)
    # Namespaces need mounts, which system_calls forbids: so it comes last.
    if kernel:
        layers["files"] = kernel.landlock(folder, readable, hidden)
        layers["system calls"] = kernel.system_calls()
    # The snippet gets no ready access to ctypes.
    for name in [name for name in sys.modules if name.split(".")[0] in ("ctypes", "_ctypes", "snippet_kernel")]:
        del sys.modules[name]
    return layers


def limit(seconds: float, memory_mib: int, folder_mib: int) -> None:
    """Limit processor time, memory, size and number of files; allow no further process and no core dump."""
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,  # in case the snippet turns off the timer below
        "RLIMIT_FSIZE": folder_mib * 2**20,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_AS": memory_mib * 2**20,
    }
    for name, value in limits.items():
        number = getattr(resource, name, None)
        if number is not None and (name != "RLIMIT_AS" or sys.platform == "linux"):
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def auditor(folder: str, readable: list[str], hidden: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that explains what the kernel would refuse with a bare error number. It is no protection: Python
    code can get round it on purpose."""
    realpath, fsdecode, absent = os.path.realpath, os.fsdecode, (int, type(None))
    inside = [os.path.realpath(folder)]
    outside = [os.path.realpath(path) for path in readable]

    def within(path: Any, roots: list[str]) -> bool:
        if isinstance(path, absent):
            return True
        real = realpath(fsdecode(path))
        if any(real == root or real.startswith(root + os.sep) for root in hidden):
            return False
        return any(real == root or real.startswith(root + os.sep) for root in roots)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"a snippet may not use {event}")
        if event == "open":
            path, _, flags = arguments
            if (flags or 0) & WRITE_FLAGS and not within(path, inside):
                raise PermissionError(f"a snippet may write in its own folder only, not to {path}")
            if not within(path, inside + outside):
                raise PermissionError(f"a snippet may read in its own folder only, not {path}")
        elif event in READING and not within(arguments[0] if arguments else None, inside + outside):
            raise PermissionError(f"a snippet may not leave its own folder for {arguments[0]}")
        elif event in WRITING and not (
            within(arguments[0], inside) and (event != "os.rename" or within(arguments[1], inside))
        ):
            raise PermissionError(f"a snippet may change its own folder only, not {arguments[0]}")

    return hook


def execute(source: str) -> int:
    """Run the snippet; print the value of its last expression, or its error. Returns the exit status."""
    status = 0
    try:
        tree: Any = compile(source, "<snippet>", "exec", PyCF_ONLY_AST)
        # As at a Python prompt: the value of a last expression is printed.
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
        names = {"__name__": "__main__", "__builtins__": builtins}
        exec(compile(tree, "<snippet>", "exec"), names)
        if last is not None:
            value = eval(compile(Expression(last.value), "<snippet>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        if error.code not in (None, 0):
            status = 1
            print(f"SystemExit: {error.code}")
    except BaseException as error:
        status = 1
        print(last_line(error))
    try:
        sys.stdout.flush()
    except BaseException:
        return 1
    return status


def last_line(error: BaseException) -> str:
    """The last line of a traceback, with the line number in the snippet."""
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:
        text = type(error).__name__
    frame, line = error.__traceback__, 0
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<snippet>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f"{text} (line {line})" if line else text


if __name__ == "__main__":
    main()
