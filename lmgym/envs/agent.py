"""Agent: how a model plays a gymnasium environment. Observations to text, text to actions; no model in here.

One class with three short methods, each with a default. Source: LlamaGym.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core.registry import register
from lmgym.types import Message

COLUMNS = {16: 4, 64: 8, 48: 12}  # of a grid with so many fields: FrozenLake-v1, FrozenLake8x8-v1, CliffWalking-v1
CLIFF = ("up", "right", "down", "left")
LAKE = ("left", "down", "right", "up")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class Agent:
    """What stands between an environment and a language model. `action_space` and `observation_space` are
    gymnasium's, set before an episode begins; each episode has an agent of its own.

    Example:
        >>> class Blackjack(Agent):
        ...     system_prompt = "You play blackjack. Answer hit or stick."
        ...     def format_observation(self, observation):
        ...         return f"You hold {observation[0]}; the dealer shows {observation[1]}."
        ...     def extract_action(self, text):
        ...         return ["stick", "hit"].index(text.strip().lower())
    """

    system_prompt: str = ""
    action_space: Any = None
    observation_space: Any = None

    def get_system_prompt(self) -> str:
        """The first message; none where it is empty."""
        return self.system_prompt

    def initial_messages(self) -> Sequence[Message]:
        """Messages between the system prompt and the first observation, such as a few moves of an example."""
        return ()

    def format_observation(self, observation: Any) -> str:
        """What the model reads of an observation. Default: its numbers, three decimals at most."""
        return words(observation)

    def format_invalid(self, reason: str, observation: str) -> str:
        """What the model reads where its answer was no legal action; `observation` is what it had read before."""
        return f"That is no legal action: {reason}. {observation}"

    def extract_action(self, text: str) -> Any:
        """The action that an answer stands for. Raises any error, or returns no legal action, where there is none.

        Default: the first number of the answer where the environment takes one of several actions, all of them where
        it takes a vector.
        """
        numbers = [float(number) for number in NUMBER.findall(text)]
        if hasattr(self.action_space, "n"):
            return int(numbers[0])
        return numbers

    def format_action(self, action: Any) -> str:
        """An answer that `extract_action` reads as this action; demonstrations are written with it."""
        return words(action)

    def demonstrate(self, observation: Any, random_action: Any) -> str:
        """What a demonstrator answers in a supervised stage. Default: a random legal action."""
        return self.format_action(random_action)


def words(value: Any) -> str:
    """Numbers as text: `(17, 6, False)` is "17 6 0", a dictionary "key: value" by lines.

    Example:
        >>> words((17, 6, False)), words([0.12345, -1.0])
        ('17 6 0', '0.123 -1')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {words(part)}" for key, part in value.items())
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, Sequence):
        return " ".join(words(part) for part in value)
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    raise TypeError(f"an observation holds {value!r}, for which there are no words; write format_observation")


@register("agent", "plain")
class Plain(Agent):
    """Numbers in, the number of an action out: plays any environment of gymnasium, without a word of explanation.

    A line break keeps an observation apart from its answer where the model has no chat template.
    """

    def format_observation(self, observation: Any) -> str:
        return words(observation) + "\n"

    def format_invalid(self, reason: str, observation: str) -> str:
        return observation


@register("agent", "blackjack")
class Blackjack(Agent):
    """Blackjack-v1."""

    system_prompt = "You play blackjack. Answer hit or stick."

    def format_observation(self, observation: Any) -> str:
        hand, dealer, ace = (int(number) for number in observation)
        return f"You hold {hand}{' with a usable ace' if ace else ''}; the dealer shows {dealer}."

    def extract_action(self, text: str) -> int:
        return ["stick", "hit"].index(text.strip().strip(".").lower())

    def format_action(self, action: Any) -> str:
        return ["stick", "hit"][int(action)]


@register("agent", "grid")
class Grid(Agent):
    """FrozenLake-v1 and CliffWalking-v1: where the player stands in, a direction out."""

    system_prompt = "You walk on a grid. Answer up, right, down or left."

    def format_observation(self, observation: Any) -> str:
        row, column = divmod(int(observation), COLUMNS[int(self.observation_space.n)])
        return f"You stand in row {row}, column {column}."

    def extract_action(self, text: str) -> int:
        return self._words().index(text.strip().strip(".").lower())

    def format_action(self, action: Any) -> str:
        return self._words()[int(action)]

    def _words(self) -> tuple[str, ...]:
        return CLIFF if int(self.observation_space.n) == 48 else LAKE
