"""One `lmgym train` as a process of its own: what the benchmarks of learning have in common."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def train(recipe: Path, settings: Sequence[str]) -> float:
    """Train a recipe with `key=value` overrides; returns the seconds of the whole process. What it prints is thrown
    away, unless it fails: that ends the benchmark with its last words."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "lmgym.cli.main", "train", str(recipe), *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"lmgym train {recipe} {' '.join(settings)}: {done.stderr.strip()}")
    return time.perf_counter() - began
