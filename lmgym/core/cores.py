"""The processors that this process may use."""

import os


def cores() -> int:
    """How many processors this process may use: of a job of SLURM or a container with its own set, those of the set.

    Example: max(1, cores() // 2) threads for each of two runs"""
    # macOS has no such sets.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
