"""What the policy reads in an episode that an `Agent` puts into words (gymnasium, OpenEnv)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lmgym.envs.agent import Agent
from lmgym.envs.base import Step
from lmgym.types import Message, RecipeText, pictures_of


@dataclass
class Dialogue:
    """The messages of one episode: the agent's opening, then an observation before each turn.

    With the memory "observation", each turn begins anew with the opening and the present message; with "conversation"
    the policy reads all so far. After `max_turns` turns the episode is truncated.

    Example: Dialogue(Agent(), "conversation", max_turns=None).begin((17, 6)) -> [{"role": "user", "content": "17 6"}]
    """

    agent: Agent
    memory: Literal["conversation", "observation"]
    max_turns: int | None
    around: Callable[[Callable[[], str]], str] | None = None  # from an observation's words to what the policy reads
    turns: int = 0  # that the policy has taken
    invalid: int = 0  # answers in a row that were no action
    shown: Message = field(default_factory=dict)  # the newest observation

    def begin(self, observation: Any) -> list[Message]:
        """The first prompt."""
        system = self.agent.get_system_prompt()
        self.opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.opening += [dict(message) for message in self.agent.initial_messages()]
        return [*self.opening, self.show(observation)]

    def show(self, observation: Any) -> Message:
        """The observation as a message. Raises TypeError if the agent returns no text."""

        def words() -> str:
            text = self.agent.format_observation(observation)
            if not isinstance(text, str) or not text:
                raise TypeError(f"format_observation returned {text!r}; it must return a text")
            return text

        self.shown = {"role": "user", "content": words() if self.around is None else self.around(words)}
        return self.shown

    def answer(self, message: Message, reward: float, info: dict[str, Any]) -> Step:
        """The step that shows the policy a message, or ends the episode if this was its last turn."""
        if self.turns == self.max_turns:
            return Step(reward=reward, truncated=True, info=info)
        if self.memory == "observation":
            return Step([*self.opening, message], reward, restart=True, info=info)
        return Step([message], reward, info=info)

    def refuse(self, reason: str, on_invalid: str, penalty: float, most: int) -> Step:
        """The step after an answer that is no action: the policy is told so, and pays the penalty unless it may `retry`
        for free. The episode ends where `on_invalid` is end, and with the `most`-th such answer in a row."""
        self.invalid += 1
        if on_invalid == "end" or self.invalid >= most:
            return Step(reward=-penalty, terminated=True, info=validity(reason))
        said = self.shown["content"]
        reply = self.agent.format_invalid(reason, said)
        if pictures_of(said) and said in reply:
            before, _, behind = reply.partition(said)
            reply = RecipeText.join(before, said, behind)
        cost = 0.0 if on_invalid == "retry" else -penalty
        return self.answer({"role": "user", "content": reply}, cost, validity(reason))


def validity(reason: str) -> dict[str, Any]:
    """What a step notes on an answer that was a valid action (no reason), or was none.

    Example: validity("it could not be read") -> {"invalid": 1.0, "reason": "it could not be read"}"""
    return {"invalid": 1.0, "reason": reason} if reason else {"invalid": 0.0}
