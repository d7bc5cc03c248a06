"""An environment of OpenEnv's form, for test_openenv.py: actions and observations are classes of pydantic."""

import random

from pydantic import BaseModel, ConfigDict


class Guess(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int
    metadata: dict[str, str] = {}


class Move(BaseModel):
    row: int
    column: int


class Seen(BaseModel):
    hint: str
    left: int = 3
    done: bool = False
    reward: float | None = None
    metadata: dict[str, str] = {}


class Guessing:
    """Guess a number; the reward is 1 for the right one and its distance as a penalty otherwise."""

    def __init__(self, highest: int = 9) -> None:
        self.highest = highest

    def reset(self) -> Seen:  # takes no seed, draws from the global generator, as many environments do
        self.secret, self.left = random.randint(0, self.highest), 3
        return Seen(hint=f"A number from 0 to {self.highest}.")

    def step(self, action: Guess) -> Seen:
        self.left -= 1
        if action.number == self.secret:
            return Seen(hint="right", left=self.left, done=True, reward=1.0)
        return Seen(hint="higher" if action.number < self.secret else "lower", left=self.left, done=self.left == 0)


class Board(Guessing):
    def step(self, action: Move) -> Seen:  # type: ignore[override]
        return Seen(hint=f"{action.row} {action.column}", reward=0.5)


class Untyped(Guessing):
    def step(self, action):  # type: ignore[no-untyped-def]
        return super().step(action)


class Broken(Guessing):
    def step(self, action: Guess) -> str:  # type: ignore[override]
        return "an observation"
