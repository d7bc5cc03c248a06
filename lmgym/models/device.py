"""Device, precision and memory limits of a policy, chosen once for a run."""

import ctypes
import math
import os
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from lmgym.core.errors import LmgymError
from lmgym.models.kernels import onednn_linear

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of these settings (malloc.h)
KEPT, LARGEST = 256 * 2**20, 32 * 2**20  # bytes of freed memory that a process keeps; of a tensor that is kept so
SMALL = 10_000_000  # parameters; in smaller models bf16 costs more in conversions than it saves


def prepare_process(threads: int) -> None:
    """Set this process's CPU threads, and let it keep some of the memory that it frees.

    A step frees its tensors and allocates as many again. glibc gives the free end of the heap back to the system each
    time, which then has to clear every page again. Up to 256 MiB stay here instead; tensors of more than 32 MiB are
    still given back at once. No result depends on it. Settings of glibc in the environment win; other systems have
    none."""
    torch.set_num_threads(threads)
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not chosen:
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGEST)
        libc.mallopt(TRIM_THRESHOLD, KEPT)


def give_memory_back() -> None:
    """Give the system what this process has freed and the C library has kept: after a model was loaded and tried, which
    leaves gaps of all sizes. It takes some milliseconds."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def choose_device(wanted: str) -> torch.device:
    """The wanted device, or with "auto" the best one of this machine; LmgymError if the machine has no such device."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        wanted = "cuda" if cuda else "mps" if mps else "cpu"
    if (wanted == "cuda" and not cuda) or (wanted == "mps" and not mps):
        raise LmgymError(f"policy.device: there is no {wanted} device here; write device: auto or cpu")
    return torch.device(wanted)


def choose_compute(wanted: str, device: torch.device, parameters: int) -> torch.dtype:
    """The precision of forward passes. "auto" measures the machine's speed; the run folder stores the result."""
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        if device.type == "cpu" and parameters >= SMALL:
            fast = bf16_speedup() > 1.5
        wanted = "bfloat16" if fast else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def choose_prepacked(compute: torch.dtype, device: torch.device) -> bool:
    """Whether a CPU samples with weights that are laid out beforehand (bf16: onednn_linear.py, fp32:
    inference/kernels/). In bf16 it is measured once, and the run folder stores the result; in fp32 it is always so,
    because there the answer would move bits."""
    return device.type == "cpu" and (compute != torch.bfloat16 or onednn_linear.pays())


@cache
def bf16_speedup(size: int = 512, rounds: int = 20) -> float:
    """How many times faster this CPU multiplies bf16 matrices than fp32 ones: best of so many `rounds` of each, by
    turns, so that what else the machine does falls on both. Measured once: a process says the same everywhere."""
    numbers = torch.linspace(-1, 1, size * size).view(size, size)
    best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    for _ in range(rounds):
        for dtype in best:
            matrix = numbers.to(dtype)
            start = time.perf_counter()
            matrix @ matrix
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return best[torch.float32] / best[torch.bfloat16]


def choose_tokens_per_forward(wanted: int | None, kind: str) -> int:
    """The limit on the tokens of a forward pass, for a `kind` of device. On a CPU more are not faster (docs/log.md)."""
    if wanted is not None:
        return wanted
    return 4096 if kind == "cpu" else 16384


def enough_tokens(wanted: int | None, kind: str, adapters: bool) -> int | None:
    """The tokens of a forward pass to which no further group is added; None: as many as fit. Where only adapters train,
    a pass has no gradients of weights to add up, so on a CPU several groups in one take more memory and as long."""
    return 1024 if wanted is None and kind == "cpu" and adapters else None


def head_rows(vocabulary: int, kind: str) -> int:
    """Hidden states per LM-head call: about 2^24 logits, whatever the vocabulary. On a CUDA device four times as many:
    for fewer rows it would spend its time on reading the head, and on starting kernels.

    Example: head_rows(150_000, "cuda") -> 447"""
    return min(max((2**26 if kind == "cuda" else 2**24) // vocabulary, 64), 8192)


def expected_device(device: str, compute: str, parameters: int) -> tuple[str, int]:
    """The kind of a recipe's device, which this machine need not have, and the bytes per number in a forward pass."""
    kind = choose_device("auto").type if device == "auto" else device
    if compute == "auto" and kind == "cuda":
        return kind, 2
    return kind, choose_compute(compute, torch.device(kind), parameters).itemsize


def memory_here(kind: str) -> int | None:
    """Bytes of memory of this machine's device of this kind, of main memory what this process may use; None if there is
    no such device or it is unknown."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    if kind == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(machine, *memory_limits())
    return None


def memory_limits(root: Path = Path("/")) -> list[int]:
    """The bytes that each control group of this process may use, if it has a limit: that of a container (docker -m), of
    a job of SLURM (--mem). Where version 1 has none, it says a number beyond any memory.

    Example: memory_limits() -> [8589934592]"""
    found: list[int] = []
    with suppress(OSError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, kinds, place = line.split(":", 2)  # "4:memory:/job/step"; of version 2 "0::/job/step"
            if kinds and "memory" not in kinds.split(","):
                continue
            top, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")
            own = Path(place.lstrip("/"))  # a container may see its group at the top, under whatever name
            for group in (own, *own.parents):
                with suppress(OSError, ValueError):  # "max" is no limit
                    found.append(int((root / "sys/fs/cgroup" / top / group / name).read_text()))
    return found
