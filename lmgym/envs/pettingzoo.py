"""PettingZoo's games in which players move in turn, as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lmgym.core import registry, seeds
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.envs.agent import Agent, read_answer, to_text
from lmgym.envs.base import Step
from lmgym.envs.dialogue import validity
from lmgym.envs.filling import filled
from lmgym.envs.spaces import allowed, check_listed, possible
from lmgym.types import Example, Message


@registry.register("env", "pettingzoo")
@dataclass(kw_only=True)
class PettingZoo(Section):
    """A game of PettingZoo in which players move in turn (AEC): pettingzoo.ID.env(**arguments).

    Each player reads its own observation, put into words by an `Agent`, answers with an action, and earns what the game
    pays it. An answer that is no action, or one that the action mask forbids, loses at once: -1, and nothing for the
    others. `opponent` is the other side: self - the policy, and the turns of all players train; current - the policy,
    but only one side, drawn by the episode's seed, trains; frozen - the policy as it was when the stage began; random -
    legal moves by chance.

    Example: PettingZoo(id="classic.tictactoe_v3", opponent="random")"""

    section = "env"

    id: str
    """The game's module in pettingzoo, such as classic.connect_four_v3, or "module:function" that makes one."""
    agent: str = "plain"
    """Who puts observations into words and reads actions: registered, or "module:Class"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the game."""
    opponent: Literal["self", "current", "frozen", "random"] = "self"
    show: str = "{observation}"
    """What a player reads before a move: {observation} in the agent's words, {actions} that are possible (of a Discrete
    space), its name as {player}, and another name in braces an entry of its info."""
    memory: Literal["conversation", "observation"] = "observation"
    """What a player sees: its own whole conversation, or only the present observation."""
    max_turns: PositiveInt | None = None
    """Most moves of all players together; the game is then truncated."""

    needs_data = False
    workers = 2  # processes for these environments, unless the recipe sets env.workers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._make_agent = registry.get("agent", self.agent)
        self._make_game = _maker(self.id)
        self._names: list[str] = list(self._game().possible_agents)
        self.players = 1 if self.opponent == "random" else len(self._names)
        self.learners: tuple[int, ...] = tuple(range(self.players))
        self.first = 0

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        self._seed, side = seed, seed // 2**32 % len(self._names)
        self._random = seeds.generator("pettingzoo", seed)
        self._side = side if self.opponent == "random" else None
        if self.opponent in ("current", "frozen"):
            self.learners = (side,)
        self._env, self._turns, self._begun = self._game(), 0, set[int]()
        self._env.reset(seed=seed % 2**31)
        self._words: Agent = self._make_agent()
        self._owed = dict.fromkeys(self._names, 0.0)  # paid to those who have not moved since
        if not self._advance():
            raise RuntimeError("the game is over before the first move")
        self.first = 0 if self.players == 1 else self._number
        return self._messages()

    def step(self, text: str, stop: str) -> Step:
        self._turns += 1
        mover = self._name
        action, reason = self._action(text)
        if reason:
            return Step(reward=-1.0, terminated=True, info=validity(reason))
        self._act(action)
        over = not self._advance()
        reward, self._owed[mover] = self._owed[mover], 0.0
        others = {}
        if self.players > 1:  # only who has moved has an episode that a reward could go to
            others = {n: self._owed[name] for n, name in enumerate(self._names) if n in self._begun and name != mover}
            self._owed |= {self._names[number]: 0.0 for number in others}
            others = {number: paid for number, paid in others.items() if paid}
        if over:
            ended = any(self._ends.values())
            return Step(reward=reward, terminated=ended, truncated=not ended, others=others, info=validity(""))
        if self._turns == self.max_turns:
            return Step(reward=reward, truncated=True, others=others, info=validity(""))
        player, fresh = (None, False) if self.players == 1 else (self._number, self._number not in self._begun)
        messages, restart = self._messages(), self.memory == "observation" and not fresh
        return Step(messages, reward, restart=restart, player=player, others=others, info=validity(""))

    def demonstrate(self) -> str:
        random = seeds.generator("demonstration", self._seed, self._turns)  # the game's own moves stay as they are
        return self._words.demonstrate(self._seen, self._any_move(random))

    def close(self) -> None:
        self._env.close()

    @property
    def _name(self) -> str:
        return str(self._env.agent_selection)

    @property
    def _number(self) -> int:
        return self._names.index(self._name)

    def _game(self) -> Any:
        try:
            return self._make_game(**self.arguments)
        except TypeError as error:
            raise LmgymError(f"env.arguments: '{self.id}' cannot be made: {error}") from error

    def _act(self, action: Any) -> None:
        """Take an action; what it pays is owed."""
        self._env.step(action)
        self._ends = dict(self._env.terminations)
        for name, reward in self._env.rewards.items():
            self._owed[name] += float(reward)

    def _advance(self) -> bool:
        """Go on to the next move of the policy. False if the game is over."""
        while self._env.agents:
            observation, _, ended, cut, self._info = self._env.last()
            if ended or cut:
                if all(self._env.terminations[name] or self._env.truncations[name] for name in self._env.agents):
                    return False
                self._env.step(None)  # a player who is out
                continue
            masked = isinstance(observation, dict) and "action_mask" in observation
            self._seen = observation["observation"] if masked else observation
            self._mask = observation["action_mask"] if masked else self._info.get("action_mask")
            self._words.action_space = self._env.action_space(self._name)
            self._words.observation_space = self._env.observation_space(self._name)
            if self._side is None or self._number == self._side:
                return True
            self._act(self._any_move(self._random))
        return False

    def _messages(self) -> list[Message]:
        """What the present player reads: with the opening, if it begins or sees nothing else."""
        text = self._words.format_observation(self._seen)
        actions = possible(self._words.action_space, self._mask)
        listed = ", ".join(map(self._words.format_action, actions))
        if "actions" not in self._info:  # as in `Gymnasium`, an entry of the info goes over the list
            check_listed(self.show, self._words.action_space)
        values = {"actions": listed, **self._info, "observation": text, "player": self._name}
        message: Message = {"role": "user", "content": filled(self.show, values, to_text, "env.show")}
        number = 0 if self.players == 1 else self._number
        begins = number not in self._begun
        self._begun.add(number)
        if self.memory == "conversation" and not begins:
            return [message]
        system = self._words.get_system_prompt()
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, *self._words.initial_messages(), message]

    def _action(self, text: str) -> tuple[Any, str]:
        """The legal action that a text means, or None and the reason."""
        space = self._words.action_space
        action, reason = read_answer(self._words, text)
        if reason:
            return None, reason
        if isinstance(action, bool) or not space.contains(action) or not allowed(space, action, self._mask):
            return None, "it is not possible now"
        return action, ""

    def _any_move(self, random: np.random.Generator) -> Any:
        """A legal move by chance."""
        space = self._words.action_space
        if moves := possible(space, self._mask):
            return np.int64(random.choice(moves))
        space.seed(int(random.integers(2**31)))
        return space.sample()


def _maker(name: str) -> Any:
    """The function that makes a game. Raises LmgymError for a name that pettingzoo does not have."""
    if ":" in name:
        return registry.load_attribute(name, f"key 'env.id': '{name}'")
    try:
        import pettingzoo  # noqa: F401
    except ImportError as error:
        raise LmgymError(f"env pettingzoo needs the library of that name ({error}); pip install pettingzoo") from error
    return registry.load_attribute(f"pettingzoo.{name}:env", f"key 'env.id': '{name}'")
