"""Lets the n-th call of some functions fail, as a broken disk would."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class FailingCalls:
    """Counts the calls of all functions that it wraps; the `left`-th from now raises OSError of this error number.

    Example: fault = FailingCalls(errno.EIO); monkeypatch.setattr(os, "fsync", fault.of(os.fsync)); fault.left = 3
    """

    number: int
    left: int = 0  # 0: none fails
    failed: int = 0

    def of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which fails when it is its turn."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.failed += 1
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **named)

        return call
