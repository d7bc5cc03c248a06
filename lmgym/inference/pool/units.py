"""A rollout cut into units of a fixed size. Imports no torch.

The bits of a completion depend on the requests that are computed beside it. In units they do not depend on who computes
them, nor on how many processes there are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmgym.inference.base import Request


@dataclass(frozen=True)
class Part:
    """Requests of one call that are computed together: their places in the call, and the number of the unit whose
    conversations they go on with (None: they are no conversations).

    Example: Part(unit=3, places=(8, 9, 11))"""

    unit: int | None
    places: tuple[int, ...]


class Units:
    """Which unit each conversation belongs to. A unit is `size` conversations, in the order in which they began; when
    none is alive, the next one begins a new unit, so that a rollout does not depend on those before it.

    Example:
        >>> units = Units(2)
        >>> [part.places for part in units.cut([Request((5,), key=1), Request((5,), key=2), Request((6,), key=3)])]
        [(0, 1), (2,)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._begun = 0  # conversations so far, with the places of units that were not filled
        self._unit_of: dict[int, int] = {}  # of those that are alive

    def cut(self, requests: Sequence[Request]) -> list[Part]:
        """The parts of one call, in the order of their first requests. Requests without a conversation are cut into
        parts of `size`; those of a unit's conversations stay together."""
        places: dict[tuple[bool, int], list[int]] = {}
        alone = 0
        for place, request in enumerate(requests):
            if request.conversation is None:
                key, alone = (False, alone // self.size), alone + 1
            else:
                key = (True, self._unit(request.conversation))
            places.setdefault(key, []).append(place)
        return [Part(unit if talks else None, tuple(own)) for (talks, unit), own in places.items()]

    def forget(self, conversations: Sequence[int]) -> dict[int, list[int]]:
        """These conversations are over: returns them by unit."""
        found: dict[int, list[int]] = {}
        for conversation in conversations:
            if conversation in self._unit_of:
                found.setdefault(self._unit_of.pop(conversation), []).append(conversation)
        if not self._unit_of:
            self._begun = -(-self._begun // self.size) * self.size
        return found

    def over(self, units: Iterable[int]) -> list[int]:
        """Those of these units that no conversation will go on with."""
        alive = {*self._unit_of.values(), self._begun // self.size}
        return [unit for unit in units if unit not in alive]

    def clear(self) -> None:
        """All conversations are over."""
        self.forget([*self._unit_of])

    def _unit(self, conversation: int) -> int:
        if conversation not in self._unit_of:
            self._unit_of[conversation], self._begun = self._begun // self.size, self._begun + 1
        return self._unit_of[conversation]
