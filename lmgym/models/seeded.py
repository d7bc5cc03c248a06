"""Random numbers that come from torch's global generator, as the initial weights of transformers do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lmgym.core import seeds


@contextmanager
def seeded(key: int, devices: Sequence[Any] = ()) -> Iterator[None]:
    """In the body, torch's generators are seeded by the key; afterwards they continue as before. Other threads that
    want the same wait."""
    with seeds.GLOBAL, torch.random.fork_rng(devices=devices):
        torch.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        yield
