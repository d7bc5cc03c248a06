"""What the rest of lmgym knows of several processes: their number, this one's part, and three ways to meet.

Each process (a rank) holds the same policy, the same batch and the same records in memory. Where work can be cut into
parts, a rank takes its own and the results are added or gathered, so that all ranks hold the same bits again. Imports
no torch: the form for several processes is in process_group.py."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from lmgym.core.errors import LmgymError

T = TypeVar("T")


class Lost(LmgymError):
    """Something outside of this process has gone. A new start can go on from the newest checkpoint."""


class RankLost(Lost):
    """Another rank has gone or does not answer."""


class Ranks:
    """One process, which does everything; `ProcessGroup` is one of several. All ranks must make the same calls of
    `add`, `gather`, `agree` and `wait`, in the same order.

    Example: the mean over all ranks' parts:
        >>> own = ranks.shares(parts, costs)[ranks.rank]
        >>> total = sum(work(part) for part in own)
        >>> ranks.totals({"work": total})["work"] / len(parts)
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    def add(self, *tensors: Any) -> None:
        """Replace each torch tensor by its sum over the ranks; all ranks then hold the same bits."""

    def gather(self, own: bytes) -> list[bytes]:
        """What each rank has given, in the order of the ranks."""
        return [own]

    def wait(self) -> None:
        """Return when all ranks have come here."""

    def loss_in(self, error: BaseException) -> Lost | None:
        """The loss that an error tells of: of another rank also one of torch's own exchanges, such as those of a model
        whose ranks hold parts of the weights; None for any other error."""
        return error if isinstance(error, Lost) else None

    def close(self) -> None:
        """Leave the other ranks."""

    def shares(self, parts: Sequence[T], costs: Sequence[float]) -> list[list[T]]:
        """Each rank's parts, in their order. The costliest part goes first, each to the rank that has the least to do
        (a tie: to the lower rank), so that every rank finds the same answer.

        Example: with 2 ranks, shares("abc", [5, 3, 2]) is [["a"], ["b", "c"]]"""
        loads, owner = [0.0] * self.size, [0] * len(parts)
        for index in sorted(range(len(parts)), key=lambda index: -costs[index]):
            owner[index] = min(range(self.size), key=lambda rank: (loads[rank], rank))
            loads[owner[index]] += costs[index]
        return [[part for part, own in zip(parts, owner, strict=True) if own == rank] for rank in range(self.size)]

    def share_groups(self, items: Iterable[T], group: Callable[[T], Any]) -> list[T]:
        """This rank's items: neighbours of equal `group(item)` stay together, and each R-th group is this rank's.

        Example: with 2 ranks, share_groups("aabbcc", str) is list("aacc") on the first rank"""
        groups: list[list[T]] = [list(own) for _, own in groupby(items, key=group)]
        return [item for own in groups[self.rank :: self.size] for item in own]

    def totals(self, own: Mapping[str, float]) -> dict[str, float]:
        """Sums by name over the ranks, added in their order in float64. A rank may lack names."""
        if self.size == 1:
            return dict(own)
        sums: dict[str, float] = {}
        for part in self.gather(json.dumps(own).encode()):
            for name, value in json.loads(part).items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def agree(self, flag: bool) -> bool:
        """True on all ranks if it is true on any of them."""
        return any(part == b"1" for part in self.gather(b"1" if flag else b"0"))


ALONE = Ranks()


def ranks_started() -> int:
    """How many processes torchrun has started for this run: its WORLD_SIZE, 1 without torchrun. Raises LmgymError if
    the variable is no number."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise LmgymError(f"the environment variable WORLD_SIZE is '{given}'; it must be a number of processes")
    return int(given)
