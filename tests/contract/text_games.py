"""A game in the form of RAGEN's and the old gym's, for test_text_game.py."""

import random
from typing import Any

import numpy as np


class Lane:
    """Walk right to the end; the start is drawn by Python's global generator."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self, seed: int | None = None, level: int = 0) -> str:
        self.place, self.level = random.randrange(2), level
        return self.render()

    def step(self, action: int) -> tuple[str, float, bool, dict[str, Any]]:
        self.place += {1: -1, 2: 1}[action]
        done = self.place == self.length
        return self.render(), 1.0 if done else -0.1, done, {"success": done, "note": "x"}

    def render(self) -> str:
        return f"level {self.level}: " + "".join("P" if place == self.place else "_" for place in range(self.length))


class Modern(Lane):
    """The same with gymnasium's values."""

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        self.place, self.level = 0, 0
        return self.render(), {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        return f"took {action}", 0.0, False, action == "stop", {}


class Arrays(Lane):
    """The same with numpy's values."""

    def step(self, action: Any) -> Any:
        notes = {"place": np.int64(3), "share": np.float32(0.5), "success": np.bool_(True), "board": np.zeros(2)}
        return "on", np.float32(0.5), np.bool_(False), notes


class Wrong(Lane):
    def step(self, action: int) -> Any:
        return "text"
