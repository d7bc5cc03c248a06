"""Classes as TRL's `environment_factory` has them: tools with a state. A worker imports this file, but no torch."""

from typing import Any


class Counter:
    """As TRL's documentation writes one: public methods are tools, reset says where it stands."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[int] = []
        self._secret = 3

    def reset(self, start: int = 0, **columns: Any) -> str | None:
        self.count, self.calls = start, []
        return f" You are at {start}." if start else None

    def add(self, number: int) -> str:
        """Adds to the counter.

        Args:
            number: how much
        """
        self.count += number
        self.calls.append(number)
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self._secret)


class Later(Counter):
    async def add(self, number: int) -> str:  # type: ignore[override]
        """Adds to the counter."""
        return Counter.add(self, number)

    async def get_reward(self) -> float:  # type: ignore[override]
        return Counter.get_reward(self)


class NoReset:
    pass


def reached(environments: list[Any], **columns: Any) -> list[float]:
    """A reward of TRL's form, which reads the environment's state."""
    return [environment.count / 10 for environment in environments]


def looks_inside(environments: list[Any], **columns: Any) -> list[float]:
    return [float(len(environment.calls)) for environment in environments]
