"""Contenders side by side: one process each, A B A B, one step at a time; medians, ratios, peak memory.

The processes stay alive, blocked on their stdin, while it is another one's turn, so that the noise of a shared machine
falls on all of them alike. Ratios are taken within a round. CPU seconds are reported beside the wall clock: other work
on the machine moves them less.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Contender:
    """What is started: a module under benchmarks/contenders, the Python that runs it, and its settings."""

    name: str
    module: str
    python: Path
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """One contender's rounds, warm-up dropped."""

    name: str
    about: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """Median seconds of one part of the step."""
        return statistics.median(parts[name] for parts in self.parts)


def measure(contenders: Sequence[Contender], workload: Path, rounds: int, warmup: int, threads: int) -> list[Result]:
    """Run `warmup` + `rounds` rounds, each contender one step a round, and return the latter's numbers."""
    with ExitStack() as stack:
        running = [stack.enter_context(started(contender, workload, threads)) for contender in contenders]
        results = [
            Result(contender.name, _heard(process, log)["ready"])
            for contender, (process, log) in zip(contenders, running, strict=True)
        ]
        for number in range(warmup + rounds):
            for result, (process, log) in zip(results, running, strict=True):
                assert process.stdin is not None
                process.stdin.write("step\n")
                process.stdin.flush()
                answer = _heard(process, log)
                result.peak_bytes = answer["peak_bytes"]
                kept = "warm-up" if number < warmup else f"round {number - warmup + 1}/{rounds}"
                parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in answer["parts"].items())
                print(f"{kept:<10} {result.name:<24} {answer['seconds']:8.2f} s: {parts}", file=sys.stderr, flush=True)
                if number >= warmup:
                    result.seconds.append(answer["seconds"])
                    result.cpu_seconds.append(answer["cpu_seconds"])
                    result.parts.append(answer["parts"])
    return results


@contextmanager
def started(contender: Contender, workload: Path, threads: int) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The contender's process and the file that holds what it says on stderr; it ends with the block."""
    settings = json.dumps({**contender.settings, "threads": threads})
    command = [contender.python, "-m", f"benchmarks.contenders.{contender.module}", workload, settings]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process, log
        finally:
            process.communicate()  # hangs up, and the contender leaves its loop


def _heard(process: subprocess.Popen[str], log: IO[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        log.seek(0)
        raise SystemExit(f"a contender stopped; its last words:\n{''.join(log.readlines()[-15:])}")
    return json.loads(line)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """Median, smallest and largest of the rounds' ratios."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"


def table(results: Sequence[Result]) -> str:
    """Markdown: seconds per step with their parts, seconds of CPU (all threads), and peak memory."""
    parts = list(results[0].parts[0])
    lines = [
        f"| contender | s/step (min to max) | {' | '.join(parts)} | CPU s | peak GiB |",
        f"|---|---|{'---|' * len(parts)}---|---|",
    ]
    for result in results:
        spread = f"{result.median:.2f} ({min(result.seconds):.2f} to {max(result.seconds):.2f})"
        cells = " | ".join(f"{result.part(part):.2f}" for part in parts)
        cpu, memory = statistics.median(result.cpu_seconds), result.peak_bytes / 2**30
        lines.append(f"| {result.name} | {spread} | {cells} | {cpu:.2f} | {memory:.2f} |")
    return "\n".join(lines)


def machine(threads: int) -> str:
    """The processor, its cores, the threads used and what else the machine was doing."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, {threads} threads, load {os.getloadavg()[0]:.1f}"


def today() -> str:
    return datetime.now(UTC).date().isoformat()
