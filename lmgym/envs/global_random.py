"""Python's global random generator, for libraries that use it: a state of its own for each episode."""

import random
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OwnRandomState:
    """Calls functions with a state of Python's global random generator that no other episode touches.

    Example:
        >>> OwnRandomState(7).call(random.random)      # and the state of the process stays as it was
        0.32383276483316237
    """

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    def call(self, function: Callable[[], T]) -> T:
        """The function's value."""
        outside = random.getstate()
        random.setstate(self._state)
        try:
            return function()
        finally:
            self._state = random.getstate()
            random.setstate(outside)
