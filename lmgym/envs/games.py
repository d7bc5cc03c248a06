"""Two small games of text: guess a number, and tic-tac-toe for two players, with self-play."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lmgym.core import seeds
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.core.validation import Section
from lmgym.envs.base import Step
from lmgym.types import Example, Message

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
Style = Literal["words", "numbers"]


@register("env", "guess_number")
@dataclass(kw_only=True)
class GuessNumber(Section):
    """Find a secret number from `low` to `high` in `guesses` guesses; a wrong one is answered by higher or lower.

    The reward is 1 for the number, else 0. Anything but a number of the range uses up a guess. With style numbers
    all messages are numbers (the range; then 1 for higher, 0 for lower), for a model that knows no words.

    Example:
        >>> env = GuessNumber(high=7, guesses=3)
        >>> env.reset(Example("game/0", "a game"), seed=1)
        'I think of a number from 0 to 7. Guess it.\\n'
    """

    section = "env"

    low: int = 0
    high: int = 99
    guesses: PositiveInt = 7
    style: Style = "words"

    needs_data = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise LmgymError(f"env.low is {self.low} and env.high {self.high}; the range needs two numbers at least")

    def reset(self, example: Example, seed: int) -> str:
        self._secret = self.low + seeds.key("secret", parent=seed) % (self.high - self.low + 1)
        self._least, self._most, self._left = self.low, self.high, self.guesses
        if self.style == "numbers":
            return f"{self.low} {self.high}\n"
        return f"I think of a number from {self.low} to {self.high}. Guess it.\n"

    def step(self, text: str, stop: str) -> Step:
        self._left -= 1
        guess = _number(text, self.low, self.high)
        if guess == self._secret:
            return Step(reward=1.0, terminated=True)
        if self._left == 0:
            return Step(terminated=True)
        if guess is None:
            reply = f"{self.low} {self.high}" if self.style == "numbers" else "That is no number of the range."
        else:
            # `demonstrate` guesses in the remaining range.
            higher = guess < self._secret
            self._least, self._most = (guess + 1, self._most) if higher else (self._least, guess - 1)
            reply = str(int(higher)) if self.style == "numbers" else ("higher" if higher else "lower")
        return Step([{"role": "user", "content": reply + "\n"}])

    def demonstrate(self) -> str:
        """The middle of the remaining range."""
        return str((max(self._least, self.low) + min(self._most, self.high)) // 2)


@register("env", "tic_tac_toe")
@dataclass(kw_only=True)
class TicTacToe:
    """Three in a row. A move is the number of an empty field, 1 to 9. The reward is 1 for a win, -1 for a loss, 0 for a
    draw. An illegal move loses at once (-1), and the other side gets nothing for it.

    `opponent` is the other side: self - the policy, and the turns of both sides train; current - the policy, but only
    one side, drawn by the episode's seed, trains; frozen - the policy as it was at the beginning of the stage; random -
    random moves. A player sees the present board with the own fields as X: each turn has a new prompt. With style
    numbers the board is nine numbers: 0 empty, 1 own, 2 the other side's.

    Example:
        >>> env = TicTacToe()
        >>> print(env.reset(Example("game/0", "a game"), seed=0))
        . . .
        . . .
        . . .
        Your move (X), 1 to 9:
    """

    opponent: Literal["self", "current", "frozen", "random"] = "self"
    style: Style = "words"

    needs_data = False
    first = 0

    def __post_init__(self) -> None:
        self.players = 1 if self.opponent == "random" else 2
        self.learners: tuple[int, ...] = tuple(range(self.players))

    def reset(self, example: Example, seed: int) -> str:
        self._random = seeds.generator("tic_tac_toe", seed)
        self._board, self._next = np.zeros(9, dtype=np.int64), 1
        side = int(self._random.integers(2))
        if self.opponent in ("current", "frozen"):
            self.learners = (side,)
        if self.opponent == "random":
            self._side = side + 1
            if self._side == 2:
                self._play(self._random_move())
        return self._show_board()

    def step(self, text: str, stop: str) -> Step:
        mover, move = self._next, _number(text, 1, 9)
        if move is None or self._board[move - 1]:
            return Step(reward=-1.0, terminated=True, info={"invalid": text[:20]})
        self._play(move)
        if self.players == 1 and self._result() is None:
            self._play(self._random_move())
        result = self._result()
        if result is None:
            message: Message = {"role": "user", "content": self._show_board()}
            return Step([message], restart=True, player=None if self.players == 1 else self._next - 1)
        # Without a move of its own, the opponent has no episode that a reward could go to.
        reward = 0.0 if result == 0 else (1.0 if result == mover else -1.0)
        others = {2 - mover: -reward} if self.players == 2 and self._moves() > 1 else {}
        return Step(reward=reward, terminated=True, others=others)

    def demonstrate(self) -> str:
        """A random legal move."""
        return str(self._random_move())

    def _play(self, move: int) -> None:
        self._board[move - 1], self._next = self._next, 3 - self._next

    def _random_move(self) -> int:
        return int(self._random.choice(np.flatnonzero(self._board == 0))) + 1

    def _moves(self) -> int:
        return int((self._board > 0).sum())

    def _result(self) -> int | None:
        """The side that has won (1 or 2), 0 for a draw, None if the game goes on."""
        for line in LINES:
            if self._board[line[0]] and len(set(self._board[list(line)].tolist())) == 1:
                return int(self._board[line[0]])
        return 0 if self._moves() == 9 else None

    def _show_board(self) -> str:
        # The player to move always sees the own fields as 1 (X).
        seen = np.where(self._board == 0, 0, np.where(self._board == self._next, 1, 2)).tolist()
        if self.style == "numbers":
            return " ".join(map(str, seen)) + "\n"
        signs = [".XO"[field] for field in seen]
        rows = "\n".join(" ".join(signs[row : row + 3]) for row in (0, 3, 6))
        return f"{rows}\nYour move (X), 1 to 9:\n"


def _number(text: str, low: int, high: int) -> int | None:
    """The number of a text that is nothing but a whole number, in ASCII digits and within the range; else None."""
    word = text.strip()
    if not (word.isascii() and word.removeprefix("-").isdigit() and len(word) < 10):
        return None
    return int(word) if low <= int(word) <= high else None
