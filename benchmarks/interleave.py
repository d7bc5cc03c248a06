"""Contenders side by side: one process each, A B A B, one step at a time.

The processes stay alive, blocked on their stdin, while it is another one's turn, so that the noise of a shared machine
falls on all of them alike. CPU seconds are kept beside the wall clock: other work on the machine moves them less.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
OFFLINE = {  # every contender is started with it: nobody asks the Hub, and no tokenizer takes a core of others
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Contender:
    """What is started: a module under benchmarks/contenders, the Python that runs it, and its settings."""

    name: str
    module: str
    python: Path = Path(sys.executable)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """One contender's rounds, warm-up dropped; the peaks are those of all rounds."""

    name: str
    about: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by part
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """Median seconds of one part of the step."""
        return statistics.median(parts[name] for parts in self.parts)

    def take(self, answer: dict[str, Any], counts: bool) -> None:
        """What the contender says of a step; a round of warm-up moves the peaks only."""
        self.peak_bytes = answer["peak_bytes"]
        self.peaks = {part: max(peak, self.peaks.get(part, 0)) for part, peak in answer["peaks"].items()}
        if counts:
            self.seconds.append(answer["seconds"])
            self.cpu_seconds.append(answer["cpu_seconds"])
            self.parts.append(answer["parts"])


SPINS = {"GOMP_SPINCOUNT": "3000"}  # as `import lmgym` sets it; the contenders import torch first


def measure(
    contenders: Sequence[Contender], workload: Path, rounds: int, warmup: int, threads: int, busy: int = 0
) -> list[Result]:
    """Run `warmup` + `rounds` rounds, each contender one step a round, and return the latter's numbers. `busy` other
    processes keep a core busy each meanwhile."""
    with ExitStack() as stack:
        for _ in range(busy):
            stack.enter_context(spinning())
        running = [stack.enter_context(started(contender, workload, threads)) for contender in contenders]
        results = [
            Result(contender.name, heard(process, log)["ready"])
            for contender, (process, log) in zip(contenders, running, strict=True)
        ]
        for number in range(warmup + rounds):
            for result, (process, log) in zip(results, running, strict=True):
                assert process.stdin is not None
                process.stdin.write("step\n")
                process.stdin.flush()
                answer = heard(process, log)
                kept = "warm-up" if number < warmup else f"round {number - warmup + 1}/{rounds}"
                parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in answer["parts"].items())
                print(f"{kept:<10} {result.name:<24} {answer['seconds']:8.2f} s: {parts}", file=sys.stderr, flush=True)
                result.take(answer, counts=number >= warmup)
    return results


@contextmanager
def spinning() -> Iterator[None]:
    """A process that does nothing but keep a core busy, until the block ends."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def started(contender: Contender, workload: Path, threads: int) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The contender's process and the file that holds what it says on stderr; it ends with the block."""
    settings = json.dumps({**contender.settings, "threads": threads})
    command = [contender.python, "-m", f"benchmarks.contenders.{contender.module}", workload, settings]
    own = SPINS if contender.module.startswith("lmgym") else {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | OFFLINE | own | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process, log
        finally:
            process.communicate()  # hangs up, and the contender leaves its loop


def heard(process: subprocess.Popen[str], log: IO[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        log.seek(0)
        raise SystemExit(f"a contender stopped; its last words:\n{''.join(log.readlines()[-15:])}")
    return json.loads(line)
