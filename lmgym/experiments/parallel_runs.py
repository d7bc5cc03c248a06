"""Trains several runs in parallel, each in a separate process `lmgym train FOLDER`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from lmgym.config.build import dump
from lmgym.config.schema import Config
from lmgym.core.cores import cores
from lmgym.logs.console import Console
from lmgym.logs.formatting import duration
from lmgym.logs.writer import disk_errors
from lmgym.training.checkpoints import checkpoint

LOG = "log.txt"  # in the run folder
Process: TypeAlias = "subprocess.Popen[bytes]"


def train_in_parallel(
    configs: Mapping[str, Config], jobs: int, is_finished: Callable[[Config], bool], console: Console
) -> tuple[dict[str, str], bool]:
    """Train each config in its folder, `jobs` at a time. Returns the errors of failed runs by label, and True if a
    signal stopped it. Ctrl-C is passed on to each process, which finishes its step and saves; a second Ctrl-C ends them
    at once.

    Example: train_in_parallel({"seed-0": config}, jobs=2, is_finished=is_finished, console=console)"""
    failed: dict[str, str] = {}
    waiting = list(configs)
    running: dict[str, tuple[Process, float]] = {}
    with _signals_to(running) as stopping:
        while running or (waiting and not stopping):
            # Start runs while there are free jobs, then collect those that have ended.
            while waiting and len(running) < jobs and not stopping:
                label = waiting.pop(0)
                process, log = _start(configs[label], jobs)
                running[label] = process, time.monotonic()
                if stopping:  # the signal came before this process was in `running`
                    process.send_signal(signal.SIGINT)
                console.say(f"{label}: started, its output is in {log}")
            for label, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[label]
                took = duration(time.monotonic() - began)
                if is_finished(configs[label]):
                    console.say(f"{label}: finished in {took}")
                elif not stopping:
                    failed[label] = _last_words(Path(configs[label].out or "") / LOG, process.returncode)
                    console.say(f"{label}: failed after {took}")
            time.sleep(0.05)
    return failed, bool(stopping)


def _start(config: Config, jobs: int) -> tuple[Process, Path]:
    folder = Path(config.out or "")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(folder / "recipe.yaml", dump(config))
        # A run keeps its number of threads for good; all cores for each run would be too many.
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // jobs))} | dict(os.environ)
        with open(folder / LOG, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lmgym.cli.main", "train", str(folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=threads,
                process_group=0,  # so Ctrl-C in the terminal reaches only this process, which passes it on
            )  # fmt: skip
    return process, folder / LOG


@contextmanager
def _signals_to(running: Mapping[str, tuple[Process, float]]) -> Iterator[list[int]]:
    """Pass Ctrl-C, SIGTERM and the closing of the terminal on to the running processes, as Ctrl-C; under nohup the last
    stays ignored. Yields the list of signals received."""
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        if number == signal.SIGHUP and received:  # the kernel and the shell may both send it
            return
        received.append(number)
        for process, _ in list(running.values()):
            process.send_signal(signal.SIGINT)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread, where signals cannot be caught
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
    try:
        yield received
    finally:
        for process, _ in running.values():  # any are left only if this code has failed
            process.send_signal(signal.SIGINT)
            process.wait()
        for known, handler in before.items():
            signal.signal(known, handler)


def _last_words(log: Path, status: int) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said, raised = (
        max((number for number, line in enumerate(lines) if line.startswith(begin)), default=-1)
        for begin in ("lmgym: ", "Traceback ")
    )
    last = "no word" if not lines else lines[said] if said > raised else lines[-1]
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{last.removeprefix('lmgym: ')} ({how}; {log})"
