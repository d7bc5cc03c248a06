"""A GPU that is not there, for walking the branches of code that only a GPU takes.

With the fixture `pretended_cuda` whoever asks for a tensor on cuda gets one on the CPU that says that it lies there
(pretend_devices.py), and a CUDA graph records the operations that run within it and runs them again, into the same
memory. The CPU computes all of it; what can be found out is that names exist, arguments fit, all operands lie on one
device, and a graph reads nothing but what keeps its address. It cannot tell a GPU's numbers, speed and memory.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft  # noqa: F401 (asks a real GPU, if it finds one at its import)
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from lmgym.models.attention import flex
from tests.pretend_devices import labels, on_cpu, pretended_devices

MEMORY = 80 * 2**30
called: list[str] = []
"""Names of torch.cuda's functions that were called, in order."""


class Recorded(TorchDispatchMode):
    """The operations that ran, with the tensors that they took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, result))
        return result


class PretendedGraph:
    """Runs again what ran while it was captured, and puts the results where they were then."""

    def __init__(self) -> None:
        self.recorded = Recorded()

    def replay(self) -> None:
        called.append("CUDAGraph.replay")
        for function, args, kwargs, before in self.recorded.steps:
            now = function(*args, **kwargs)
            for old, new in zip(_tensors(before), _tensors(now), strict=True):
                if old.data_ptr() != new.data_ptr():  # no view, and nothing written in place
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for each in value for one in _tensors(each)] if isinstance(value, (tuple, list)) else []


@contextmanager
def capture(graph: PretendedGraph, pool: Any = None, **others: Any) -> Iterator[None]:
    called.append("graph")
    labels.capturing = True
    try:
        with graph.recorded:
            yield
    finally:
        labels.capturing = False


def dense_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> torch.Tensor:
    """What the compiled kernel of flex attention gives; uncompiled it has no gradient on a CPU."""
    called.append("flex_attention")
    assert query.dtype == key.dtype == value.dtype  # the kernel refuses others, or computes in fp32
    length = query.shape[2]
    mask = create_mask(block_mask.mask_mod, 1, 1, length, length, device=str(query.device))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def compiled(function: Any, **settings: Any) -> Any:
    """torch.compile without a compiler of GPU kernels."""
    called.append(f"compile {function.__name__}")
    return dense_flex if function.__name__ == "flex_attention" else function


def noted(name: str, value: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return value

    return function


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The pretended GPU; the names of torch.cuda's functions that are called while it is there. Fails at the end if
    an operation has mixed devices, even where the code has caught the exception."""
    called.clear()
    properties = types.SimpleNamespace(
        total_memory=MEMORY, name="Pretended", uuid="one", major=9, minor=0, multi_processor_count=132
    )
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "Pretended",
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "max_memory_allocated": 2**30,
        "memory_allocated": 2**29,
        "memory_reserved": 2**30,
        "mem_get_info": (MEMORY // 4, MEMORY),
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "graph_pool_handle": (0, 1),
        "manual_seed_all": None,
        "manual_seed": None,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, noted(name, value))
    state = torch.ones(16, dtype=torch.uint8)
    for name, value in {"get_rng_state": state, "set_rng_state": None}.items():
        monkeypatch.setattr(torch.cuda, name, noted(name, value))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.autocast, "__init__", on_cpu(torch.autocast.__init__))
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # another thread would not see the mode
    flex._compiled.cache_clear()
    with pretended_devices():
        yield called
    flex._compiled.cache_clear()
    assert not labels.refused
