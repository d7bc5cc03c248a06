"""Generators as actors of Ray: it places them, on this machine or on a cluster, and carries weights and ids to them.

A generator that dies, or does not answer in time, is replaced by a new one, and the units that it had are computed
again: their calls so far are repeated, so every bit is as it was. Ray's own wire carries pickles, so that whoever can
reach its ports can run code; keep it on trusted networks (docs/engines.md)."""

import copy
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Lost
from lmgym.inference.base import Completion
from lmgym.inference.pool.differences import difference
from lmgym.inference.pool.generator import Call
from lmgym.inference.pool.ray_node import RESUME, RayNode
from lmgym.inference.pool.ray_process import Process, arrays_of
from lmgym.inference.proof import draw_pictures
from lmgym.models.copies import without_weights
from lmgym.models.policy import Policy
from lmgym.types import Restriction

MOST_LOSSES = 3  # of generators at one and the same call; then the run ends
STARTUP = 300.0  # seconds more that a new process may take to its first answer
LOOK = 20.0  # seconds without an answer, after which the size of the cluster is looked at
ANSWER = 10.0  # seconds that a Ray elsewhere may take to answer
SPARE = 256 * 2**20  # bytes of Ray's object store beside the weights


@dataclass
class Worker:
    """An actor as the training process sees it."""

    actor: Any
    version: int | None = None  # of the weights that it was sent last; None: it has none yet
    units: set[int] = field(default_factory=set)  # whose conversations it caches, with these weights


class RayGenerators:
    """`workers` actors, each with one CPU of Ray's for each of its `threads` (or one GPU, if the policy is on one).

    `seconds` is the limit of one call. `address` is that of a Ray cluster; without it Ray starts on this machine and
    ends with the run. `warn` is told of generators that are replaced. `versions` of the weights are in use at once.

    Example: InUnits(policy, RayGenerators(policy, workers=2, threads=1), size=32)"""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        threads: int = 1,
        rows: int = 256,
        captured: bool = False,
        seconds: float = 600.0,
        address: str | None = None,
        warn: Callable[[str], None] = print,
        versions: int = 1,
    ) -> None:
        self.settings, self.seconds, self.warn = (threads, rows, captured), seconds, warn
        size = sum(parameter.numel() * parameter.element_size() for parameter in policy.model.parameters())
        on_gpu = policy.device.type == "cuda"
        self._needs = ("GPU", workers) if on_gpu else ("CPU", workers * threads)
        self._started = _connect(address, workers * threads, (2 + versions) * size + SPARE, *self._needs)
        self._node = RayNode()
        self._class = ray.remote(num_gpus=1 if on_gpu else 0, num_cpus=0 if on_gpu else threads)(Process)
        draw_pictures(policy)
        with self._node.watched():
            self._empty = ray.put(without_weights(policy))
            self._frozen = ray.put(arrays_of(policy, trained=False))
        self._history: dict[int, list[Call]] = {}
        self._differs = address is not None and _has_other_machines()
        self._last: list[np.ndarray] | None = None  # what was pushed last, where differences are sent
        self.pushed = 0  # how often weights were loaded; the version that every answer is checked for
        self.workers = [Worker(self._actor()) for _ in range(workers)]
        self.load(policy, 0)

    def answer(self, calls: Sequence[Call]) -> Iterator[tuple[int, list[Completion]]]:
        """Each call goes to the generator that caches its unit, else to the first one that is free."""
        waiting = deque(range(len(calls)))
        running: dict[Any, tuple[int, Worker, float]] = {}
        losses = [0] * len(calls)
        while waiting or running:
            # 1. Give each free generator a call.
            busy = {id(worker) for _, worker, _ in running.values()}
            for worker in self.workers:
                place = None if id(worker) in busy else self._next(worker, waiting, calls)
                if place is not None:
                    waiting.remove(place)
                    allowed = self.seconds + (STARTUP if worker.version is None else 0.0)
                    running[self._send(worker, calls[place])] = (place, worker, time.monotonic() + allowed)
            # 2. Wait for the first answer, at most until the first time limit.
            first = min(limit for _, _, limit in running.values())
            left = max(0.0, first - time.monotonic())
            with self._node.watched():
                ready, _ = ray.wait([*running], timeout=min(left, LOOK))
            if not ready and left > LOOK:
                self._check_room()
                continue
            late = [] if ready else [answer for answer, (_, _, limit) in running.items() if limit == first]
            for answer in [*ready, *late]:
                place, worker, _ = running.pop(answer)
                found = self._result(answer, late=bool(late))
                if isinstance(found, str):  # the generator is lost
                    losses[place] += 1
                    self._replace(worker, found, losses[place])
                    waiting.appendleft(place)
                    continue
                call = calls[place]
                if call.unit is not None:
                    self._history.setdefault(call.unit, []).append(call)
                yield place, found

    def drop(self, units: Sequence[int]) -> None:
        over = set(units)
        for unit in units:
            self._history.pop(unit, None)
        for worker in self.workers:
            if own := self._units(worker) & over:
                worker.units -= own
                worker.actor.drop.remote([*own])

    def load(self, policy: Policy, version: int) -> None:
        """Put the trained weights where all generators read them; each one takes them before its next call. On other
        machines it takes what has changed, if it has the weights before these, in bf16."""
        self._history.clear()
        arrays, changes = arrays_of(policy, trained=True), None
        if self._differs and all(array.dtype == np.int16 for array in arrays):
            if self._last is not None:
                changes = [difference(old, new) for old, new in zip(self._last, arrays, strict=True)]
            self._last = [array.copy() for array in arrays]
        with self._node.watched():
            self._trained, self.pushed = ray.put(arrays), self.pushed + 1
            self._changes = None if changes is None else ray.put(changes)

    def restricted(self, restriction: Restriction, mask: Policy | None) -> "RayGenerators":
        raise LmgymError(
            "engine.name: pool does not hold the frozen policy that restricts what is sampled; write engine: sampler"
        )

    def kept(self) -> "RayGenerators":
        """The same actors, asked with the weights that were loaded last."""
        other = copy.copy(self)
        other._history = {}
        return other

    def close(self) -> None:
        """End the generators, and Ray if it was started here."""
        self._node.close()
        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers = []
        if self._started:
            ray.shutdown()

    def _actor(self) -> Any:
        return self._class.remote(*self.settings)

    def _next(self, worker: Worker, waiting: Sequence[int], calls: Sequence[Call]) -> int | None:
        """The first waiting call of a unit that this generator caches, or else of one that none does."""
        elsewhere = {unit for other in self.workers if other is not worker for unit in self._units(other)}
        own = [place for place in waiting if calls[place].unit in self._units(worker)]
        return next(iter(own), next((place for place in waiting if calls[place].unit not in elsewhere), None))

    def _units(self, worker: Worker) -> set[int]:
        """The units that a generator caches, if it has these weights."""
        return worker.units if worker.version == self.pushed else set()

    def _send(self, worker: Worker, call: Call) -> Any:
        """Ask a generator, which first takes the weights if it does not have them: the answer to come."""
        loaded = None
        if worker.version is None:
            loaded = worker.actor.begin.remote(self._empty, self._frozen, self._trained, self.pushed)
        elif worker.version == self.pushed - 1 and self._changes is not None:
            loaded = worker.actor.change.remote(self._changes, self.pushed)
        elif worker.version != self.pushed:
            loaded = worker.actor.load.remote(self._trained, self.pushed)
        if loaded is not None:
            worker.units.clear()
        worker.version = self.pushed
        before: list[Call] = []
        if call.unit is not None and call.unit not in worker.units:
            worker.units.add(call.unit)
            before = self._history.get(call.unit, [])
        return worker.actor.answer.remote(loaded, call, before)

    def _result(self, answer: Any, late: bool) -> list[Completion] | str:
        """The completions of an answer; or why the generator is lost. Raises LmgymError if it refused the call."""
        if late:
            return f"did not answer within {self.seconds:g} seconds"
        try:
            with self._node.watched():
                version, completions = ray.get(answer)
        except RayTaskError as error:
            if isinstance(error.cause, LmgymError):
                raise LmgymError(str(error.cause)) from None
            if not isinstance(error.cause, RayError):
                raise
            return _reason(error.cause)
        except RayError as error:
            return _reason(error)
        if version != self.pushed:
            raise LmgymError(f"a generator sampled with weights {version}, and {self.pushed} were sent; this is a bug")
        return completions

    def _replace(self, worker: Worker, why: str, losses: int) -> None:
        """Put a new actor in the place of a lost one. Raises LmgymError if the same call has lost too many."""
        with self._node.watched():  # if Ray itself has gone, no new one will come
            ray.kill(worker.actor)
        if losses == MOST_LOSSES:
            raise LmgymError(f"{losses} generators were lost at the same answers; the last one {why}")
        self.warn(f"a generator was lost, and its answers are sampled again: it {why}")
        worker.actor, worker.version = self._actor(), None
        worker.units.clear()

    def _check_room(self) -> None:
        """Raise Lost if Ray's cluster has become too small, so that a lost generator would be waited for in vain."""
        kind, needed = self._needs
        with self._node.watched():
            there = int(ray.cluster_resources().get(kind, 0))
        if there < needed:
            raise Lost(
                f"a machine of Ray's cluster has gone: {there} {kind}s are left, and the generators need {needed}; "
                f"bring it back, or lower engine.workers, then {RESUME}"
            )


def _connect(address: str | None, processors: int, memory: int, kind: str, needed: int) -> bool:
    """Connect to Ray at this address, or start it here with so many processors and bytes; True if it was started. A Ray
    to which this process is connected already is used as it is. Raises LmgymError if it has fewer than the `needed`
    CPUs or GPUs (`kind`), for which it would wait in vain."""
    if started := not ray.is_initialized():
        here = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}  # reachable from this machine only
        own: dict[str, Any] = {"num_cpus": processors, "object_store_memory": memory, **here}
        own = own if address is None else {}
        _knock(address)
        if address is None:  # 15 by default, and then other programs on the machine hold the whole training up
            os.environ.setdefault("RAY_worker_niceness", "0")
            os.environ.setdefault("RAY_ENABLE_MAC_LARGE_OBJECT_STORE", "1")  # on macOS Ray refuses more than 2 GiB else
        try:
            ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **own)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise LmgymError(f"engine.address: no Ray at {address or 'this machine'} ({_reason(error)})") from error
    there = int(ray.cluster_resources().get(kind, 0))
    if there < needed:
        if started:
            ray.shutdown()
        things = {"CPU": "processors", "GPU": "GPU(s)"}[kind]
        raise LmgymError(f"engine.workers: the generators need {needed} {things} together, and Ray has {there}")
    return started


def _knock(address: str | None) -> None:
    """Raise LmgymError if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not (host and port.isdigit()):  # "auto", or nothing
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, OverflowError) as error:
        raise LmgymError(f"engine.address: no Ray at {address} ({error}); start one there: ray start --head") from error


def _has_other_machines() -> bool:
    """Whether Ray may place generators on another machine than this process's."""
    here = ray.get_runtime_context().get_node_id()
    return any(node["Alive"] and node["NodeID"] != here for node in ray.nodes())


def _reason(error: BaseException) -> str:
    """An error of Ray's in a few words."""
    return f"ended ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
