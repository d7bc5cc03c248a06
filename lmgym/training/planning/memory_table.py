"""What takes memory, and in which phases of a step: the parts of an estimate, their sums, and its table."""

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["copying", "rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("copying", "rollout", "score", "update")
MASTER = 4  # bytes of a parameter that trains, of its gradient, and of each of its moments


@dataclass(frozen=True)
class Part:
    """One thing that takes memory, and the phases in which it does. Example: Part("gradients", 6e7, ("update",))"""

    name: str
    bytes: float
    phases: tuple[Phase, ...] = PHASES

    @property
    def held(self) -> bool:
        """True if it stays for the whole stage."""
        return self.phases == PHASES


@dataclass
class Estimate:
    """The parts of a stage, and their sums. "copying" is a phase of its own only where each rank holds a part of the
    model: whole copies are then made at the beginning of a stage, and again when a reference is refreshed.

    Example:
        >>> Estimate([Part("weights", 8.0), Part("cache", 4.0, ("rollout",))]).peak
        12.0
    """

    parts: list[Part] = field(default_factory=list)

    def add(self, name: str, count: float, *phases: Phase) -> None:
        if count > 0:
            self.parts.append(Part(name, count, phases or PHASES))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the table."""
        copying = any("copying" in part.phases and not part.held for part in self.parts)
        return PHASES if copying else PHASES[1:]

    @property
    def held(self) -> float:
        """Bytes that stay for the whole stage."""
        return sum(part.bytes for part in self.parts if part.held)

    def total(self, phase: Phase) -> float:
        """Bytes held at once in a phase."""
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> float:
        return max(self.total(phase) for phase in self.phases)

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each part, with a cell for each of `phases`, and one for the sums."""
        rows = [
            (part.name, *(size(part.bytes) if phase in part.phases else "-" for phase in self.phases))
            for part in self.parts
        ]
        return [*rows, ("total", *(size(self.total(phase)) for phase in self.phases))]


def size(count: float) -> str:
    """Bytes for people.

    Example:
        >>> size(3 * 2**30), size(2**20)
        ('3.00 GiB', '1 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"
