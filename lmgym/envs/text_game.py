"""A class that speaks text: `reset` gives a text and `step` takes one action (the form of RAGEN and the old gym)."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, Literal

from lmgym.core import registry
from lmgym.core.constraints import FINITE, PositiveInt
from lmgym.core.errors import LmgymError, represent
from lmgym.core.validation import Section
from lmgym.envs.agent import Agent
from lmgym.envs.base import Step
from lmgym.envs.dialogue import Dialogue, validity
from lmgym.envs.filling import from_row
from lmgym.envs.global_random import OwnRandomState
from lmgym.envs.step_checks import plain, reward_number
from lmgym.types import Example, Message


@registry.register("env", "text_game")
@dataclass(kw_only=True)
class TextGame(Section):
    """An episode of environment(**arguments). Its `reset` (with `seed`, if it has that parameter) returns a text, or a
    text and an info; its `step(action)` returns text, reward, done and info, or gymnasium's five values.

    An answer may hold several actions, which are taken one after the other until the episode is over; their rewards are
    added, and the policy reads the last text. An answer without an action that `actions` lists costs `invalid_penalty`
    and is told so; actions behind one that is none are not taken. `Step.info` has `invalid`, `actions` (how many were
    taken) and the numbers of the last info.

    Example: TextGame(environment="my_games:Sokoban", actions={"Up": 1, "Down": 2}, answer="<answer>(.*?)</answer>")"""

    section = "env"

    environment: str
    """The class, "module:Class"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    reset_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `reset`; a value "{name}" is taken from the example's meta."""
    actions: dict[str, Any] | None = None
    """The environment's action for each word that the policy may write, in upper or lower case; left out: its text."""
    answer: str | None = None
    """A regular expression with one group: the part of an answer that holds the actions. Left out: the whole."""
    separator: str = "||"
    """Separates the actions of an answer; empty: an answer is one action."""
    max_actions: PositiveInt = 5
    """Most actions of an answer that are taken."""
    max_turns: PositiveInt | None = None
    """Most turns of an episode; it is then truncated."""
    system_prompt: str = ""
    memory: Literal["conversation", "observation"] = "conversation"
    """What the policy sees: the whole conversation, or only the present text."""
    invalid_penalty: Annotated[float, FINITE] = 0.1

    needs_data = False
    workers = 16  # processes for these environments, unless the recipe sets env.workers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._make = registry.load_attribute(self.environment, f"key 'env.environment': '{self.environment}'")
        for method in ("reset", "step"):
            if not callable(getattr(self._make, method, None)):
                raise LmgymError(f"key 'env.environment': '{self.environment}' has no method {method}")
        try:
            groups = re.compile(self.answer or "()").groups
        except re.error as error:
            raise LmgymError(f"key 'env.answer' is no regular expression: {error}") from error
        if groups != 1:
            raise LmgymError(f"key 'env.answer' has {groups} groups; it needs one, such as <answer>(.*?)</answer>")
        self._known = self.actions and self._by_word(self.actions)

    def _by_word(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """The actions by their words in lower case. Raises LmgymError for a word that no answer could mean."""
        known: dict[str, str] = {}
        for word in actions:
            if word != word.strip() or not word or (self.separator and self.separator in word):
                raise LmgymError(
                    f"key 'env.actions': no answer can mean {word!r}; a word is not empty, has no space at its ends, "
                    f"and does not hold the separator ({self.separator!r}, env.separator)"
                )
            if (other := known.setdefault(word.lower(), word)) != word:
                raise LmgymError(
                    f"key 'env.actions': {other!r} and {word!r} differ in upper and lower case alone, which does not "
                    "count; give each action a word of its own"
                )
        return {word.lower(): action for word, action in actions.items()}

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        self._random = OwnRandomState(seed)
        self._env = self._random.call(lambda: self._make(**self.arguments))
        arguments = from_row(self.reset_arguments, example, "env.reset_arguments")
        if "seed" in inspect.signature(self._env.reset).parameters:
            arguments = {"seed": seed % 2**31, **arguments}
        first = self._random.call(lambda: self._env.reset(**arguments))
        agent = Agent()
        agent.system_prompt = self.system_prompt
        self._dialogue = Dialogue(agent, self.memory, self.max_turns)
        return self._dialogue.begin(_text(first[0] if isinstance(first, tuple) else first))

    def step(self, text: str, stop: str) -> Step:
        self._dialogue.turns += 1
        chosen = self._actions(text)
        if not chosen:
            reply = f"That holds no action. {self._dialogue.shown['content']}"
            info = {**validity("no action"), "actions": 0.0}
            return self._dialogue.answer({"role": "user", "content": reply}, -self.invalid_penalty, info)
        earned, taken, info = 0.0, 0, dict[str, Any]()
        for action in chosen:
            seen, reward, done, truncated, info = self._take(action)
            earned, taken = earned + reward, taken + 1
            if done or truncated:
                break
        known = {name: plain(value) for name, value in info.items()}
        notes = {name: float(value) for name, value in known.items() if isinstance(value, Real)}
        notes |= {**validity(""), "actions": float(taken)}
        if done or truncated:
            return Step(reward=earned, terminated=done, truncated=truncated and not done, info=notes)
        return self._dialogue.answer(self._dialogue.show(seen), earned, notes)

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _actions(self, text: str) -> list[Any]:
        """The environment's actions of an answer, up to the first part that is none."""
        if self.answer is not None:
            found = re.search(self.answer, text, re.DOTALL)
            text = found[1] if found else ""
        parts = [part.strip() for part in (text.split(self.separator) if self.separator else [text])]
        chosen = list[Any]()
        for part in parts[: self.max_actions]:
            if not part or (self._known is not None and part.lower() not in self._known):
                break
            chosen.append(part if self._known is None else self._known[part.lower()])
        return chosen

    def _take(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One action: text, reward, done, truncated and info. Raises TypeError for anything else."""
        values = self._random.call(lambda: self._env.step(action))
        if not isinstance(values, tuple) or len(values) not in (4, 5):
            raise TypeError(f"step returned {represent(values)}; it must return text, reward, done and info")
        seen, reward, done, info = values[0], values[1], values[2], values[-1]
        truncated = len(values) == 5 and bool(values[3])
        return (
            _text(seen),
            reward_number(reward),
            bool(done),
            truncated,
            dict(info) if isinstance(info, Mapping) else {},
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the environment showed {represent(value)}; it must show a text")
    return value
