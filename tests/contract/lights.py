"""Environments of gymnasium that draw themselves, or show pixels, or nothing."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Lights(gymnasium.Env[Any, Any]):
    """A row of three lamps, one of them on; the answer is its number, and then the next one is on."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.on = (seed or 0) % 3
        return self.on, {}

    def step(self, action: Any) -> Any:
        right, self.on = int(action) == self.on, (self.on + 1) % 3
        return self.on, float(right), False, False, {}

    def render(self) -> Any:
        pixels = np.zeros((8, 24, 3), np.uint8)
        pixels[:, 8 * self.on : 8 * self.on + 8] = 255
        return pixels


class Pixels(Lights):
    """The same, observed by its pixels; it draws nothing itself."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (8, 24, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0] * 0 + self.render(), {}

    def step(self, action: Any) -> Any:
        return self.render(), *super().step(action)[1:]


class Dark(Lights):
    """The same, but it shows nothing."""

    metadata = {"render_modes": []}  # noqa: RUF012


gymnasium.register("Lights-v0", Lights, disable_env_checker=True)
gymnasium.register("Pixels-v0", Pixels, disable_env_checker=True)
gymnasium.register("Dark-v0", Dark, disable_env_checker=True)
