"""Every call that changes a file fails once, and the power fails after every call: nothing unequal, nothing lost.

    python -m tests.torture.io_faults                      all calls; about an hour of processor time
    python -m tests.torture.io_faults --every 40 --images 1

A small run (a frozen reference, a best model, a checkpoint each step) is trained from its start, resumed from its
middle, and resumed from its end, where it saves its last checkpoint once more. In the first part the n-th call fails,
with EIO or with ENOSPC from there on, for all n: the run has to end in one sentence (or to go on, where the call does
not matter), and the next one has to end as the run that nothing happened to, bit for bit. In the second part the power
fails after call n: what was not flushed is kept or lost at random (crash_images.py). The run is resumed from what is
left, at no older a checkpoint than had been written, and has to end the same.

Needs Linux on x86-64 and a C compiler: Rust and C++ write as well, so the calls are caught below them, by a preloaded
library. Failures are listed, and the exit status is then 1.
"""

import argparse
import errno
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.training.checkpoints import checkpoint
from tests import runs
from tests.torture.crash_images import Call, Disk, read_log

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a flush takes no time there, and proves as much
SOURCE = Path(__file__).with_suffix(".c")
WAITING = re.compile(r", (which takes some seconds|\d+ s)$")  # what a slow machine is told about a wait
RECIPE: dict[str, Any] = {
    "task": None,
    "rewards": None,  # the game's own: no process for rewards has to start
    "env": {"name": "guess_number", "high": 9, "guesses": 2},
    "prompts_per_step": 2,
    "steps": 4,
    "algorithm": {"name": "grpo", "group_size": 4, "kl_coefficient": 0.1},
    "evaluation": {"every": 2, "examples": 4, "keep_best": "reward"},
    "checkpoint": {"every": 1, "keep": 1},
}
RUNS = ("from the start", "resumed", "finished, resumed")
FAULTS = {"EIO": (errno.EIO, False), "ENOSPC from there on": (errno.ENOSPC, True)}
DRIVER = """
import ctypes, json, os, sys
import lmgym.training.evaluation_points, lmgym.training.loop
from lmgym.cli.main import main
lmgym.training.evaluation_points.training_plot = lambda metrics, plot: plot
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
library.io_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(order["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 1)
        os.dup2(1, 2)
        log = order["log"]
        library.io_arm(order["folder"].encode(), order["at"], order["error"], order["stays"], log and log.encode())
        status = main(order["arguments"])
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def compiler() -> str | None:
    """A C compiler of this machine, where the library can be used at all."""
    usable = sys.platform == "linux" and platform.machine() == "x86_64"
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None) if usable else None


class Machine:
    """Trains the recipe in processes whose calls are counted, logged or made to fail; as a context manager."""

    def __init__(self, place: Path) -> None:
        self.place, self.disk, self.log = place, place / "disk", place / "calls.log"
        self.folder = self.disk / "run"  # the folder above it counts too: it holds its name
        self.disk.mkdir()
        library = place / "io_faults.so"
        command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self.recipe = runs.write(place / "recipe.yaml", **RECIPE)
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER], cwd=runs.ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
        )
        assert self._read() == "ready"

    def train(self, at: int = 0, error: int = 0, stays: bool = False, steps: int | None = None) -> int:
        """Train, or resume what is in the folder; the call number `at` fails (0: none). Returns the exit status."""
        what = [str(self.recipe), f"out={self.folder}"]
        if steps is not None:
            what.append(f"steps={steps}")
        elif (self.folder / "recipe.yaml").is_file():
            what = [str(self.folder)]
        order = {
            "arguments": ["train", *what, *(["steps=4"] if len(what) == 1 else [])],
            "output": str(self.place / "output.txt"),
            "folder": str(self.disk),
            "at": at,
            "error": error,
            "stays": int(stays),
            "log": str(self.log),
        }
        assert self.driver.stdin is not None
        print(json.dumps(order), file=self.driver.stdin, flush=True)
        return int(self._read())

    @property
    def said(self) -> str:
        return (self.place / "output.txt").read_text()

    def keep(self, name: str) -> Path:
        """Move the run folder to another name."""
        shutil.rmtree(self.place / name, ignore_errors=True)
        return Path(shutil.move(self.folder, self.place / name))

    def put(self, folder: Path | None) -> None:
        """Begin with a copy of a run folder, or without one."""
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk.mkdir()
        if folder is not None:
            shutil.copytree(folder, self.folder)

    def _read(self) -> str:
        assert self.driver.stdout is not None
        return self.driver.stdout.readline().strip()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.driver.stdin is not None
        self.driver.stdin.close()
        self.driver.wait()


def check_equal(machine: Machine, whole: Path) -> None:
    """The finished run is the one that nothing happened to, bit for bit."""
    runs.assert_equal_runs(whole, machine.folder)
    for name in ("best", "copies"):
        for file in sorted(path.relative_to(whole) for path in (whole / name).rglob("*") if path.is_file()):
            assert (whole / file).read_bytes() == (machine.folder / file).read_bytes(), file
    left = [path for path in machine.folder.rglob(".*") if path.name != ".lock"]
    assert not [path for path in left if path.parent.name in ("checkpoints", "copies")], left


def check_sentence(machine: Machine, status: int) -> str:
    """How a run took a call that failed: "ended" in one sentence, or "went on"."""
    said = machine.said
    assert "Traceback" not in said and status in (0, 1), said
    if status == 0:
        return "went on"
    sentences = [line for line in said.splitlines() if line.startswith("lmgym: ") and not WAITING.search(line)]
    assert len(sentences) == 1, said
    [sentence] = sentences
    assert str(machine.folder) in sentence and len(sentence) < 1000, sentence
    return "ended in a sentence"


def fail_calls(machine: Machine, begin: Path | None, whole: Path, numbers: Iterable[int]) -> Counter[str]:
    """The first part, for some of the calls of a run that begins with the folder `begin`."""
    counts: Counter[str] = Counter()
    for number in numbers:
        for name, (error, stays) in FAULTS.items():
            machine.put(begin)
            try:
                what = check_sentence(machine, machine.train(number, error, stays))
                assert machine.train() == 0, machine.said
                check_equal(machine, whole)
            except AssertionError as failure:
                what = f"FAILED at call {number}: {failure}"
            counts[f"{name}: {what}"] += 1
    return counts


def safe_checkpoint(calls: list[Call], folder: Path) -> tuple[int, int] | None:
    """The newest checkpoint that had been renamed and flushed at the end of these calls."""
    renamed, safe = None, None
    for call in calls:
        name = Path(os.fsdecode(call.data))
        if call.op == "R" and name.parent == folder / "checkpoints" and not name.name.startswith("."):
            renamed = checkpoint.stage_and_step(name)
        elif call.op == "S" and call.path == str(folder / "checkpoints"):
            safe = renamed
    return safe


def fail_power(
    machine: Machine, begin: Path | None, whole: Path, numbers: Iterable[int], images: int, seed: int
) -> Counter[str]:
    """The second part: after some of the calls, what a kill leaves and so many images of a power failure."""
    machine.put(begin)
    disk, done = Disk(machine.disk), 0
    assert machine.train() == 0, machine.said
    calls, counts = read_log(machine.log), Counter[str]()
    before = None if begin is None else checkpoint.stage_and_step(runs.newest(begin))
    for number in numbers:
        for call in calls[done:number]:
            disk.play(call)
        done = number
        safe = safe_checkpoint(calls[:number], machine.folder) or before
        for image in range(images + 1):
            what = "kill" if image == 0 else "power failure"
            disk.crash(machine.disk, random.Random(f"{seed} {number} {image}") if image else None)
            try:
                check_kept(machine, safe)
                assert machine.train() == 0, machine.said
                check_equal(machine, whole)
                what += ": resumed"
            except (AssertionError, LmgymError) as failure:
                what += f": FAILED after call {number}, image {image}: {failure}"
            counts[what] += 1
    return counts


def check_kept(machine: Machine, safe: tuple[int, int] | None) -> None:
    """No checkpoint that was on the disk is lost."""
    if safe is not None:
        found, _ = checkpoint.newest(machine.folder / "checkpoints", resumes=True)
        place = checkpoint.stage_and_step(found) if found else None
        assert place is not None and place >= safe, f"checkpoint {safe} is lost, there is {place}"


def torture(
    machine: Machine,
    every: int,
    images: int,
    seed: int,
    say: Callable[[str], None] = print,
    chosen: Sequence[str] = RUNS,
) -> Counter[str]:
    """Both parts, for every so many calls (all: 1) of the chosen runs."""
    total: Counter[str] = Counter()
    machine.put(None)
    assert machine.train(steps=2) == 0, machine.said
    half = machine.keep("half")
    assert machine.train() == 0, machine.said
    whole = machine.keep("whole")
    for name, begin in (("from the start", None), ("resumed", half), ("finished, resumed", whole)):
        if name not in chosen:
            continue
        machine.put(begin)
        assert machine.train() == 0, machine.said
        check_equal(machine, whole)
        count = len(read_log(machine.log))
        numbers, started = range(random.Random(seed).randint(1, every), count + 1, every), time.perf_counter()
        say(f"{name}: {count} calls that change files, {len(numbers)} of them tried")
        sys.stdout.flush()
        found = fail_calls(machine, begin, whole, numbers)
        found += fail_power(machine, begin, whole, numbers, images, seed)
        for what, times in sorted(found.items()):
            say(f"  {what}: {times:,}")
        say(f"  {time.perf_counter() - started:,.0f} s")
        total += found
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="try every so many calls (default: all)")
    parser.add_argument("--images", type=int, default=2, help="power failures at each call (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="which runs (default: all)")
    given = parser.parse_args(arguments)
    if compiler() is None:
        print("io_faults needs Linux on x86-64 and a C compiler", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as place, Machine(Path(place)) as machine:
        found = torture(machine, given.every, given.images, given.seed, chosen=given.runs)
    return int(any("FAILED" in what for what in found))


if __name__ == "__main__":
    sys.exit(main())
