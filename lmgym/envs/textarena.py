"""TextArena's games of text, for one player or several (extra `textarena`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmgym.core import registry
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.envs.base import Step, library
from lmgym.envs.global_random import OwnRandomState
from lmgym.types import Example, Message


@registry.register("env", "textarena")
@dataclass(kw_only=True)
class TextArena(Section):
    """A game of TextArena (github.com/LeonGuertler/TextArena) by its id, without its wrappers: a player reads each
    new observation once, and the whole answer is the action. The game pays its rewards at its end.

    With `opponent` self the turns of all players train; with current (the policy) or frozen (the policy as it was at
    the beginning of the stage) those of one player, drawn by the episode's seed. TextArena uses Python's global random
    generator; each game here has a state of it. Raises LmgymError for an unknown id, or if the game refuses the number
    of players.

    Example: TextArena(id="TicTacToe-v0", players=2)"""

    section = "env"

    id: str
    players: PositiveInt = 2
    opponent: Literal["self", "current", "frozen"] = "self"
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of textarena.make."""
    max_turns: PositiveInt | None = None
    """Most turns of all players together; the game is then truncated."""

    needs_data = False
    workers = 2  # processes for these environments, unless the recipe sets env.workers

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learners: tuple[int, ...] = tuple(range(self.players))
        self.first = 0
        known = _library().envs.registration.ENV_REGISTRY
        if f"{self.id}-raw" not in known:
            names = sorted(name.removesuffix("-raw") for name in known if name.endswith("-raw"))
            hint = registry.suggest(self.id, names).split("Valid:")[0].strip()
            raise LmgymError(f"env.id: TextArena has no '{self.id}'; {hint or f'it has {len(names)} games'}")

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        if self.opponent != "self":
            self.learners = (seed // 2**32 % self.players,)
        self._random, self._turns, self._played = OwnRandomState(seed), 0, set[int]()
        self._env = _library().make(f"{self.id}-raw", **self.arguments)
        try:
            self._random.call(lambda: self._env.reset(num_players=self.players, seed=seed % 2**31))
        except AssertionError as error:
            raise LmgymError(f"env.players: '{self.id}' refuses {self.players} players: {error}") from error
        # The game decides who begins; `_observe` asks it.
        self.first = self._next = 0
        message = self._observe()
        self.first = self._next
        return [message]

    def step(self, text: str, stop: str) -> Step:
        self._turns += 1
        mover = self._next
        self._played.add(mover)
        over, _ = self._random.call(lambda: self._env.step(text))
        # Pay only players who have moved: the others have no episode.
        if over:
            rewards, _ = self._random.call(self._env.close)
            paid = {player: float((rewards or {}).get(player, 0.0)) for player in self._played}
            return Step(reward=paid.pop(mover), terminated=True, others=paid)
        if self._turns == self.max_turns:
            return Step(truncated=True)
        message = self._observe()
        return Step([message], player=self._next)

    def _observe(self) -> Message:
        """The messages that the next player has not read yet, without those that this player wrote."""
        self._next, seen = self._random.call(self._env.get_observation)
        names = self._env.state.role_mapping
        texts = [
            text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in seen
            if sender != self._next
        ]
        return {"role": "user", "content": "\n\n".join(texts) or "Your turn."}


def _library() -> Any:
    return library("textarena", "textarena", "textarena", "'lmgym[textarena]'")
