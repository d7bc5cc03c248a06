"""Ranks as the processes of one torch.distributed group: gloo for what lies on the CPU, NCCL for what lies on GPUs."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmgym.core.errors import LmgymError, describe
from lmgym.distributed.ranks import ALONE, Lost, RankLost, Ranks, ranks_started

SECONDS = 1800.0  # torch's own limit for a wait
BUCKET = 2**24  # numbers that are added in one call, so that what is copied for it stays small
LARGE = 2**18  # numbers from which a tensor is added where it is: copying it would take longer than a call of its own
LISTENING = 1.0  # seconds, for the others to notice a loss too, and beyond a limit for torch to notice it itself


def ranks_of_environment(seconds: float = SECONDS) -> Ranks:
    """The group that torchrun has started this process for; `ALONE` where it was not started by torchrun.

    `seconds` is the limit of each wait for the others. Raises RankLost if the group does not come together."""
    return ALONE if ranks_started() == 1 else ProcessGroup(seconds)


class ProcessGroup(Ranks):
    """This process among those that torchrun has started (it sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT).

    Raises RankLost if not all of them come within `seconds`, and (with the ranks that are missing) if one does not
    answer for so long or has gone; LmgymError if one of these variables is wrong."""

    def __init__(self, seconds: float = SECONDS) -> None:
        name = f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE')}"
        could_not = f"{name} could not join the others within {seconds:g} s"
        joining = Future[dist.Store]()
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            # In a thread, because torch tries several times, each as long as the limit, if another rank dies meanwhile.
            Thread(target=_join, args=(joining, timedelta(seconds=seconds)), daemon=True).start()
            store = joining.result(seconds + LISTENING)
        except TimeoutError as error:
            raise RankLost(could_not) from error
        except RuntimeError as error:
            raise RankLost(f"{could_not}: {describe(error)}") from error
        except (ValueError, KeyError) as error:
            raise LmgymError(f"{could_not}: {describe(error)}") from error
        self.seconds, self.rank, self.size = seconds, dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("lmgym", store)

    def add(self, *tensors: Tensor) -> None:
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._meet(partial(dist.all_reduce, bucket[0].detach()))
                continue
            flat = torch.cat([tensor.detach().flatten() for tensor in bucket])
            self._meet(partial(dist.all_reduce, flat))
            with torch.no_grad():
                for tensor, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def gather(self, own: bytes) -> list[bytes]:
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self._meet(partial(dist.all_reduce, sizes))
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._meet(partial(dist.all_gather, parts, padded))
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]

    def wait(self) -> None:
        self.gather(b"")

    def loss_in(self, error: BaseException) -> Lost | None:
        one: BaseException | None = error
        while one is not None:  # a sentence about a model may have been made of it on its way
            if isinstance(one, Lost):
                return one
            of_gloo = type(one) is RuntimeError and "gloo/" in str(one)  # its errors have no type of their own
            if of_gloo or isinstance(one, dist.DistError):
                return RankLost(f"rank {self.rank}: lost the connection to {self._missing()}")
            one = one.__cause__
        return None

    def close(self) -> None:
        with suppress(RuntimeError):  # the others may have gone first
            dist.destroy_process_group()

    def _meet(self, act: Callable[[], Any]) -> None:
        """Take part in one exchange."""
        began = time.monotonic()
        try:
            act()
        except RuntimeError as error:
            silent = time.monotonic() - began > 0.9 * self.seconds
            how = f"no answer within {self.seconds:g} s from" if silent else "lost the connection to"
            raise RankLost(f"rank {self.rank}: {how} {self._missing()}") from error

    def _missing(self) -> str:
        """Who is missing: those that have not noticed a loss themselves, some seconds after this rank has."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        heard: set[int] = set()

        def ask() -> None:
            with suppress(RuntimeError):
                self._store.set(f"lost/{self.rank}", "")
                while True:
                    heard.update(rank for rank in others if self._store.check([f"lost/{rank}"]))
                    time.sleep(0.1)

        # In a thread, because the store may be behind a dead connection, and has no limit of its own.
        Thread(target=ask, daemon=True).start()
        time.sleep(LISTENING)
        missing = [str(rank) for rank in others if rank not in heard] or [str(rank) for rank in others]
        return f"rank {missing[0]}" if len(missing) == 1 else f"one of the ranks {', '.join(missing)}"


def _join(joining: "Future[dist.Store]", limit: timedelta) -> None:
    """Make the group of all ranks; `joining` gets the store that they share."""
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            # A wait beyond the limit is an exception, as gloo's is; else NCCL's watchdog ends the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        joining.set_result(store)
    except BaseException as error:
        joining.set_exception(error)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type on one device, up to about `BUCKET` numbers together; each large tensor alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() >= LARGE:
            yield [tensor]
            continue
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not alike or sum(one.numel() for one in bucket) + tensor.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
