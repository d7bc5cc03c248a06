"""One `lmgym train` as a process of its own: what the benchmarks of learning have in common."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def train(recipe: Path, settings: Sequence[str]) -> float:
    """Train a recipe with `key=value` overrides; returns the seconds of the whole process. What it prints is thrown
    away, unless it fails: that ends the benchmark with its last words."""
    return train_timed(recipe, settings)[0]


def train_timed(recipe: Path, settings: Sequence[str]) -> tuple[float, float]:
    """As `train`; returns the seconds of the whole process, and those that it and its children had a processor."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "lmgym.cli.main", "train", str(recipe), *settings]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            sys.exit(f"lmgym train {recipe} {' '.join(settings)}: {errors.read().strip()}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime
