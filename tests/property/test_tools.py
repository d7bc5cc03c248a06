"""Hostile text and hostile snippets: every one gets an answer within its limits, and leaves nothing behind."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.envs.conversation import Conversation
from lmgym.envs.tools.calls import Call, Unreadable
from lmgym.envs.tools.parsing import parse_calls
from lmgym.envs.tools.sandbox import runner
from lmgym.envs.tools.sandbox.runner import Limits, protection, python_within, require, run
from lmgym.envs.tools.sandbox.snippet_kernel import CALLS, OPENS
from lmgym.types import Example

pytestmark = pytest.mark.processes

HERE = "tests.property.test_tools"
QUESTION = Example("a/0", "Hello")
QUICK = Limits(seconds=1.0, wall_seconds=10.0, memory_mib=256, folder_mib=4)
LAYERS = ("network and folder", "files", "system calls")

PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",",
    ":", '{"name": "echo", "arguments": {"value": ', '{"name": "calculator", "arguments": {"expression": "', '"}}',
    "}}", '{"name": "echo", "parameters": {}}', '"name"', '"arguments"', "NaN", "Infinity", "-", "1e999", "9" * 5000,
    "null", "9**9**9", "__import__('os').system('true')", "\u0663\u0664", "\uff11", "\\ud800", "\x00", "\u202e",
    "<function=", "</function>", "<parameter=", "</parameter>", ">", "<|tool_call>", '<|"|>', "call:echo{", "value:",
    "\U0001f600", " ", "\n", ";", "true", "[" * 3000, '{"a":' * 3000, "(" * 3000, '"a": 1, "a": 2', "x" * 1000,
]  # fmt: skip
LONG = [
    "[",
    '{"a":',
    "<tool_call>",
    "<function=f>",
    "<parameter=",
    "<|tool_call>call:f{a:",
    "call:f{a:",
    "{a:",
    ",a:",
    "}call:f{",
    "9",
    "[TOOL_CALLS]",
    "\\ud800",
    '{"name": "echo", "arguments": {}};',
    "(",
    "\u0663",
]

CASES = {
    "infinite loop": ("while True: pass", "error: it took more than 1 s of processor time"),
    "huge power": ("10**10**10", "error: it took more than 1 s of processor time"),
    "memory": ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError (line 2)"),
    "one allocation": ("bytearray(2**40)", "MemoryError (line 1)"),
    "fork": ("import os\nwhile True: os.fork()", "PermissionError: a snippet may not use os.fork (line 2)"),
    "thread": ("import threading\nthreading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
    "subprocess": ("import subprocess\nsubprocess.run(['true'])", "PermissionError: a snippet may not use subprocess."),
    "system": ("import os\nos.system('true')", "PermissionError: a snippet may not use os.system"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "PermissionError: a snippet may not use os.exec"),
    "socket": ("import socket\nsocket.socket()", "PermissionError: a snippet may not use socket.__new__"),
    "url": ("import urllib.request as r\nr.urlopen('http://127.0.0.1:1')", "PermissionError"),
    "signal": ("import os\nos.kill(os.getppid(), 9)", "PermissionError: a snippet may not use os.kill"),
    "reading": ("open('/etc/passwd').read()", "PermissionError: a snippet may read in its own folder only"),
    "listing": ("import os\nos.listdir(HOME)", "PermissionError: a snippet may not leave its own folder"),
    "home": ("open(HOME + '/.bashrc').read()", "PermissionError: a snippet may read in its own folder only"),
    "link": ("import os\nos.symlink('/etc/passwd', 'p')", "PermissionError: a snippet may not use os.symlink"),
    "ctypes": ("import ctypes", "PermissionError: a snippet may not use ctypes.dlopen"),
    "exit": ("import os\nos._exit(3)", "error: its process ended with status 3"),
    "sys.exit": ("import sys\nprint('so')\nsys.exit('bad')", "so\nSystemExit: bad"),
    "crash": ("import os\nos.abort()", "error: its process was killed (SIG"),
    "recursion": ("f = lambda: f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "sleep": ("import time\ntime.sleep(100)", "error: it did not finish within"),
    "silence": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "error: it took more than 1 s"),
    "packages": ("import pydantic", "ModuleNotFoundError: No module named 'pydantic'"),
    "input": ("input()", "EOFError"),
    "syntax": ("1 +", "SyntaxError: invalid syntax (<snippet>, line 1)"),
    "nesting": ("(" * 40_000, "SyntaxError: too many nested parentheses"),
    "null": ("1\x00", "null bytes"),
    "surrogate": ("'\ud800'", "UnicodeEncodeError"),
    "odd error": ("class E(Exception):\n def __str__(self): 1/0\nraise E", "E (line 3)"),
    "odd value": ("class V:\n def __repr__(self): 1/0\nV()", "ZeroDivisionError"),
}  # fmt: skip

STANDARD = """
abc argparse array ast asyncio base64 bisect bz2 calendar cmath collections.abc concurrent.futures configparser
contextlib copy csv curses datetime decimal difflib dis doctest email.mime.text enum fractions functools glob gzip
hashlib heapq html.parser inspect io itertools json keyword linecache locale logging lzma math multiprocessing numbers
operator pathlib pickle platform pprint queue random re secrets shlex shutil sqlite3 ssl statistics string struct
tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest.mock uuid warnings weakref
xml.dom.minidom xml.etree.ElementTree zipfile zlib zoneinfo
"""

# What the kernel refuses by itself: the same process without the audit hook.
KERNEL = """
import ctypes, os, signal, socket, subprocess, sys, threading
here, folder, outside, readable, hidden = sys.argv[1:]
sys.path.insert(0, here)
import snippet_process
packages = hidden.split("\\n")
inside = [os.path.join(path, name) for path in packages for name in os.listdir(path) if name.endswith((".py", ".pth"))]
layers = snippet_process.isolate(folder, readable.split("\\n"), hidden.split("\\n"), 5.0, 512, 4)
libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "refused")

attempts = {
    "read": lambda: open(outside).read(),
    "passwd": lambda: open("/etc/passwd").read(),
    "self": lambda: open("/proc/self/environ").read(),
    "write": lambda: open(outside, "w"),
    "truncate": lambda: os.open(outside, os.O_RDONLY | os.O_TRUNC),
    "truncate its own": lambda: os.open("own", os.O_RDONLY | os.O_TRUNC),  # of others, for old Landlocks
    "truncate by name": lambda: os.truncate(outside, 0),
    "delete": lambda: os.remove(outside),
    "move": lambda: os.rename(outside, "here"),
    "create": lambda: open(outside + "2", "x"),
    "folder": lambda: os.mkdir(outside + "3"),
    "list": lambda: os.listdir(os.path.dirname(outside)),
    **{f"packages of {path}": lambda path=path: os.listdir(path) for path in packages},
    **{f"beside {path}": lambda path=path: os.listdir(os.path.dirname(path)) for path in packages},
    **{f"package {path}": lambda path=path: open(path).read() for path in inside},
    "package by its descriptor": lambda: os.open("x.pth", os.O_RDONLY, dir_fd=os.open(packages[0], os.O_PATH)),
    "package around a corner": lambda: open("/proc/self/root" + inside[0]),
    "package by a link": lambda: os.link(inside[0], "package"),
    "permissions": lambda: os.chmod(outside, 0),
    "owner": lambda: os.chown(outside, 1, 1),
    "times": lambda: os.utime(outside, (0, 0)),
    "symlink": lambda: os.symlink(outside, "link"),
    "fork": lambda: os._exit(7) if os.fork() == 0 else None,
    "program": lambda: os.execv("/bin/true", ["true"]),
    "child": lambda: subprocess.run(["/bin/true"]),
    "socket": lambda: socket.socket(socket.AF_INET),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "kill": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "kill all": lambda: os.kill(-1, signal.SIGTERM),
    "new namespace": lambda: checked(libc.unshare(0x10000000)),
    "mount": lambda: checked(libc.mount(b"none", folder.encode(), b"tmpfs", 0, None)),
    "trace": lambda: checked(libc.ptrace(16, os.getppid(), 0, 0)),
    "limits of others": lambda: checked(libc.prlimit(os.getppid(), 7, bytes(16), None)),
    "io_uring": lambda: checked(min(libc.syscall(425, 8, bytes(120)), 0)),
    "anonymous file": lambda: os.memfd_create("x"),
}
with open("own", "w") as file:
    file.write("mine")
for name, attempt in attempts.items():
    try:
        attempt()
        print(name, "done", flush=True)
    except OSError as error:
        print(name, "refused", flush=True)
try:
    threading.Thread(target=print).start()
    print("thread done")
except RuntimeError:
    print("thread refused")
print("own", open("own").read(), flush=True)
import decimal, sqlite3, ssl  # extension modules and what they link to can still be loaded
print("modules fine", flush=True)
os._exit(0)
"""


def echo(value: Any = None) -> Any:
    """Returns what it is given."""
    return value


def hostile(number: int) -> str:
    """The text of a seed; every 500th is a megabyte long."""
    source = random.Random(number)
    if number % 500 == 250:
        piece = source.choice(LONG)
        return source.choice(
            ["", "<tool_call>", "[TOOL_CALLS]", '{"name": "echo", "arguments": {"value": ']
        ) + piece * (1_000_000 // len(piece))
    return "".join(source.choices(PIECES, k=source.choice([1, 3, 8, 20])))


def processes() -> set[str]:
    """Processes whose working folder or command has to do with a snippet."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            if "/snippet_process.py" in command and str(os.getpid()) == (folder / "stat").read_text().split()[3]:
                found.add(f"{folder.name} {command}")
        except OSError:
            continue
    return found


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().split(")")[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for snippets' folders; nothing may be left in it, nor any process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert processes() == set()


@pytest.fixture
def without_kernel(
    scratch: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """As on a machine whose kernel offers nothing: kernel.py cannot be imported."""
    script = tmp_path_factory.mktemp("script") / "snippet_process.py"
    script.write_text(runner.SCRIPT.read_text())
    monkeypatch.setattr(runner, "SCRIPT", script)
    protection.cache_clear()
    yield scratch
    protection.cache_clear()


needs_kernel = pytest.mark.skipif(
    not (sys.platform == "linux" and all(protection()[layer] for layer in ("files", "system calls"))),
    reason="needs a kernel with Landlock and seccomp",
)


# --- text ---


@pytest.mark.slow
@settings(max_examples=300)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
@example("<tool_call>" * 50)
def test_any_text_is_parsed_to_so_many_calls_at_most(text: str) -> None:
    found = parse_calls(text, most=4)
    assert len(found) <= 5 and all(isinstance(one, Call | Unreadable) for one in found)
    assert all(len(one.reason) < 500 for one in found if isinstance(one, Unreadable))


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=10,
        ),
        max_size=4,
    ),
    st.text(min_size=1, max_size=10),
)
def test_what_is_written_as_json_is_read_back(arguments: dict[str, Any], name: str) -> None:
    whole = json.dumps({"name": name, "arguments": arguments})
    tags = any(mark in whole for mark in ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"))
    if not tags:
        assert parse_calls(f"<tool_call>{whole}</tool_call>") == [Call(name, arguments)]
        assert parse_calls(f"[TOOL_CALLS] [{whole}]") == [Call(name, arguments)]
        assert parse_calls(whole) == [Call(name, arguments)]


def test_three_thousand_hostile_turns_get_bounded_answers() -> None:
    made = errors = 0
    for number in range(3_000):
        env = Conversation(tools=["calculator", f"{HERE}:echo"], max_calls=4, max_result_chars=300)
        env.reset(QUESTION, 0)
        step = env.step(hostile(number), "eos")
        assert step.over or step.messages
        assert len(step.messages) <= 5
        for message in step.messages:
            assert len(message["content"]) <= 300
            message["content"].encode()  # a tokenizer takes it
        made += step.info["calls"] - step.info["invalid_calls"]
        errors += step.info["invalid_calls"]
    assert made > 50 and errors > 500  # the texts are not all plain prose


# --- snippets ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_hostile_snippet_costs_its_own_answer_alone(kind: str, scratch: Path) -> None:
    code, says = CASES[kind]
    limits = Limits(seconds=1.0, wall_seconds=2.0 if kind == "sleep" else 20.0, memory_mib=256, folder_mib=4)
    result = run(code.replace("HOME", repr(str(Path.home()))), limits)
    assert says in result and result != "(no output)"
    assert len(result) <= limits.max_output


@pytest.mark.slow
def test_files_stay_in_the_folder_and_within_its_size(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text("mine")
    assert "PermissionError" in run(f"open({str(outside)!r}, 'w')", QUICK)
    assert "PermissionError" in run(f"import os\nos.remove({str(outside)!r})", QUICK)
    assert "PermissionError" in run(f"import os\nos.rename({str(outside)!r}, 'here')", QUICK)
    assert "PermissionError" in run(f"import sqlite3\nsqlite3.connect({str(outside)!r})", QUICK)
    assert outside.read_text() == "mine"
    assert run("open('a', 'w').write('x')\nimport os\nos.listdir('.'), open('a').read()", QUICK) == "(['a'], 'x')"
    assert run("import os\nos.listdir('.')", QUICK) == "[]"  # nothing is kept
    assert "File too large" in run("with open('a', 'wb', 0) as f:\n for i in range(9): f.write(bytes(2**20))", QUICK)
    if protection()["network and folder"]:
        many = "for i in range(9):\n with open(str(i), 'wb') as f: f.write(bytes(2**20))"
        assert "No space left on device" in run(many, QUICK)
    assert "PermissionError" in run("import os, shutil\nshutil.rmtree(os.getcwd())", QUICK)
    assert run("import os\nfor i in range(300):\n os.mkdir('d'); os.chdir('d')", QUICK) == "(no output)"


@pytest.mark.slow
def test_much_output_keeps_both_ends(scratch: Path) -> None:
    result = run("for i in range(200000): print(i)\n1/0", Limits(max_output=500))
    assert len(result) <= 500 and result.startswith("0\n1\n2\n")
    assert result.endswith("199999\nZeroDivisionError: division by zero (line 2)") and "left out" in result
    endless = "while True: print('x' * 10000)"
    output, _ = runner._process(endless, Limits(seconds=1.0, max_output=500))
    assert len(output) < 100_000  # of some hundred megabytes


def test_a_long_source_is_not_run(scratch: Path) -> None:
    assert run("#" * 10_000_000, QUICK) == "error: the code has 10000000 characters; at most 50000 are run"


def test_snippets_say_what_python_would(scratch: Path) -> None:
    assert run("x = 6\nprint('so')\nx * 7", QUICK) == "so\n42"
    assert run("x = 6", QUICK) == run("None", QUICK) == run("", QUICK) == "(no output)"
    assert run("def f(x):\n    return 1 / x\nf(0)", QUICK) == "ZeroDivisionError: division by zero (line 2)"
    assert run("import math, json, re, collections, datetime, itertools\nmath.comb(5, 2)", QUICK) == "10"


def test_the_same_snippet_says_the_same(scratch: Path) -> None:
    code = "import os, random\nprint({str(i) for i in range(20)}, os.getcwd())\nrandom.random()"
    assert len({run(code, QUICK) for _ in range(3)}) == 1


def test_snippets_run_side_by_side_in_threads(scratch: Path) -> None:
    results: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: run(f"open('a', 'x').write('{n}')\n{n}", QUICK)}))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: str(n) for n in range(6)}


@pytest.mark.parametrize(("header", "column"), [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)])
def test_numbers_of_system_calls_are_the_kernels(header: str, column: int) -> None:
    path = Path("/usr/include") / header
    if not path.is_file():
        pytest.skip("needs the kernel's headers")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)[ \t]+(\d+)", path.read_text()))
    table = {**CALLS, **{name: numbers for name, (numbers, _) in OPENS.items()}}
    for name, numbers in table.items():
        theirs = found.get("fstatat" if name == "newfstatat" and column else name)
        assert str(numbers[column]) == str(theirs), name


@needs_kernel
def test_the_kernel_alone_refuses_it(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside" / "file", tmp_path / "folder"
    outside.parent.mkdir()
    outside.write_text("mine")
    folder.mkdir()
    before = outside.stat()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            KERNEL,
            str(runner.SCRIPT.parent),
            str(folder),
            str(outside),
            *map("\n".join, runner.readable()),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith("done")] == [], done.stderr
    assert sum(line.endswith("refused") for line in lines) > 30 + 2 * len(runner.readable()[1])
    assert lines[-2:] == ["own mine", "modules fine"], done.stderr
    assert outside.read_text() == "mine" and [path.name for path in outside.parent.iterdir()] == ["file"]
    assert (outside.stat().st_mode, outside.stat().st_mtime) == (before.st_mode, before.st_mtime)


@pytest.mark.parametrize(("killed", "found"), [(runner.ATTEMPTS - 1, True), (runner.ATTEMPTS, False)])
def test_a_killed_probe_is_started_again(
    killed: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asks what the kernel enforces kills itself some times before it asks."""
    counter, real = tmp_path / "count", runner.SCRIPT
    counter.write_text("0")
    script = tmp_path / "probe.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        f"count = int(open({str(counter)!r}).read())\n"
        f"print(count + 1, file=open({str(counter)!r}, 'w'), end='', flush=True)\n"
        f"os.kill(os.getpid(), signal.SIGKILL) if count < {killed} else None\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(runner, "SCRIPT", script)
    if found:
        assert protection.__wrapped__().keys() == set(runner.LAYERS)
    else:
        with pytest.raises(LmgymError, match=r"cannot start here: its process was killed \(SIGKILL\)"):
            protection.__wrapped__()
    assert int(counter.read_text()) == min(killed + 1, runner.ATTEMPTS)


@pytest.mark.parametrize("isolation", ["kernel", "process"])
def test_installed_packages_cannot_be_read(isolation: Literal["kernel", "process"], scratch: Path) -> None:
    """Neither those of the virtual environment nor those of the Python below it: no text, no list, no import."""
    if isolation == "kernel" and not (protection()["files"] and protection()["system calls"]):
        pytest.skip("needs a kernel with Landlock and seccomp")
    limits = Limits(seconds=2.0, folder_mib=4, isolation=isolation)
    folders, package = runner.readable()[1], Path(pytest.__file__).parent
    assert str(package.parent.resolve()) in folders
    for code in (
        f"open({str(package / '__init__.py')!r}).read()",
        *(f"import os\nos.listdir({folder!r})" for folder in folders),
        f"import os\nos.chdir({str(package)!r})",
    ):
        assert "PermissionError" in run(code, limits)
    for folder in folders:
        said = run(f"import sys\nsys.path.insert(0, {folder!r})\nimport pytest, pip", limits)
        assert said.startswith(("ModuleNotFoundError: No module named 'pytest'", "PermissionError"))


def test_the_standard_library_can_be_imported(scratch: Path) -> None:
    """What a snippet needs: modules of Python, of C, and within packages, imported after the isolation."""
    modules = STANDARD.split()
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    assert set(missing) <= {"bz2", "curses", "lzma", "sqlite3", "ssl"}  # a Python may be built without them
    said = run("\n".join(f"import {name}" for name in modules if name not in missing) + "\n6 * 7", Limits())
    assert said == "42"


@pytest.mark.slow
def test_without_the_kernel_nothing_runs_unless_asked_for(without_kernel: Path) -> None:
    assert protection() == dict.fromkeys(LAYERS, False)
    with pytest.raises(
        LmgymError, match="cannot be isolated on this machine: the kernel enforces no limits on files and"
    ):
        Conversation(tools=["python"])
    assert run("1", Limits()) == "error: the snippet was not run, since it could not be isolated"
    loose = Limits(isolation="process", seconds=1.0, folder_mib=4)
    require(loose)
    assert python_within(loose)("6 * 7") == "42"
    assert "PermissionError" in run("open('/etc/passwd')", loose)
    assert "PermissionError" in run("import os\nos.fork()", loose)
    assert "MemoryError" in run("bytearray(2**40)", loose)
    assert "processor time" in run("while True: pass", loose)
    deep = "import os\nfor i in range(2000):\n os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')"
    assert run(deep, loose) == "1"  # and the folder is gone: see `scratch`


def test_what_a_snippet_started_ends_with_it(without_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither kernel nor audit hook is in the way, children die with the process group."""
    script = runner.SCRIPT.read_text().replace("sys.addaudithook(auditor", "(auditor").replace('"RLIMIT_NPROC": 0,', "")
    assert script != runner.SCRIPT.read_text()
    runner.SCRIPT.write_text(script)
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], stdout=-3).pid)"
    child = int(run(code, Limits(isolation="process", wall_seconds=20.0)))
    for _ in range(100):  # it has been killed, but may take a moment to die
        if not alive(child):
            break
        time.sleep(0.1)
    assert not alive(child)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seconds": 0}, "'seconds' of python snippets must be at least 0.01, not 0"),
        ({"wall_seconds": float("inf")}, "'wall_seconds'"),
        ({"memory_mib": 8}, "'memory_mib' of python snippets must be at least 64, not 8"),
        ({"max_output": 1}, "'max_output'"),
    ],
)
def test_limits_that_cannot_be_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(LmgymError, match=says):
        Limits(**arguments)
