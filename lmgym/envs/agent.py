"""Agent: translates between a gymnasium environment and a language model: observations to text, text to actions.

One class with three short methods, each with a default. It holds no model. Source: LlamaGym."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core.registry import register
from lmgym.envs.spaces import fitted, read_action, written_action
from lmgym.types import Message

COLUMNS = {16: 4, 64: 8, 48: 12}  # by number of fields: FrozenLake-v1, FrozenLake8x8-v1, CliffWalking-v1
CLIFF = ("up", "right", "down", "left")
LAKE = ("left", "down", "right", "up")
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?")  # 2, 0.5, .5, 5e-1; of "No.5" the 5


class InvalidActionError(Exception):
    """An answer that is no action of the environment; its text is for the model."""


class Agent:
    """Writes observations as text for the model, and reads actions from its answers.

    Each episode gets a new agent. `action_space` and `observation_space` are those of the gymnasium environment; they
    are set before the episode begins.

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
        """The system message; an empty text means none."""
        return self.system_prompt

    def initial_messages(self) -> Sequence[Message]:
        """Messages between the system prompt and the first observation, for example a few moves as a demonstration."""
        return ()

    def format_observation(self, observation: Any) -> str:
        """An observation as text. Default: its numbers, with at most three decimals."""
        return to_text(observation)

    def format_invalid(self, reason: str, observation: str) -> str:
        """The reply to an answer that is not a legal action; `observation` is the text that the model was answering."""
        return f"That is no legal action: {reason}. {observation}"

    def extract_action(self, text: str) -> Any:
        """The action that an answer means. For an answer without a legal action it may return something that is not in
        the action space, or raise an error (but see `is_mistake_of_code`).

        Default: the first number of the answer if the environment has numbered actions (it must be whole); JSON for a
        space of several parts (Dict, Tuple); the text itself for a space of texts; otherwise all its numbers."""
        numbers = [float(number) for number in NUMBER.findall(text)]
        return read_action(self.action_space, text, numbers) if self._has_space() else numbers

    def format_action(self, action: Any) -> str:
        """An answer that `extract_action` reads as this action. `demonstrate` uses it."""
        default = self._has_space() and type(self).extract_action is Agent.extract_action
        return written_action(self.action_space, action) if default else to_text(action)

    def demonstrate(self, observation: Any, random_action: Any) -> str:
        """The answer to imitate in a supervised stage. Default: a random legal action."""
        return self.format_action(random_action)

    def _has_space(self) -> bool:
        """True for a space of gymnasium; OpenEnv's actions have a JSON schema in its place."""
        return hasattr(self.action_space, "contains")


def is_mistake_of_code(error: Exception) -> bool:
    """True for an error of `extract_action` that no answer can cause: a name or attribute that does not exist, an
    import that fails, a method that is not written. Others, and an attribute of None, which `re.match` returns, mean
    that the answer could not be read.

    Example: is_mistake_of_code(NameError("name 'txet' is not defined")) -> True"""
    if isinstance(error, AttributeError):
        return error.obj is not None
    return isinstance(error, NameError | ImportError | NotImplementedError)


def read_answer(agent: Agent, text: str) -> tuple[Any, str]:
    """The action that an agent reads in an answer, in the form that its space of gymnasium contains; or None and why
    it is none. Raises what is a mistake in the agent's code."""
    try:
        action = agent.extract_action(text)
        return fitted(agent.action_space, action) if hasattr(agent.action_space, "contains") else action, ""
    except InvalidActionError as error:
        return None, str(error)
    except Exception as error:
        if is_mistake_of_code(error):
            raise
        return None, "it could not be read"


def to_text(value: Any) -> str:
    """Numbers as text: `(17, 6, False)` is "17 6 0"; a dictionary has a line "key: value" for each key.

    Example: to_text((17, 6, False)), to_text([0.12345, -1.0]) -> ('17 6 0', '0.123 -1')"""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {to_text(part)}" for key, part in value.items())
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, Sequence):
        return " ".join(to_text(part) for part in value)
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    raise TypeError(f"an observation holds {value!r}, which has no default text; write format_observation")


@register("agent", "plain")
class Plain(Agent):
    """Numbers in, the number of an action out: works with any environment of gymnasium, without a prompt in words.

    A line break separates an observation from the answer, for models without a chat template."""

    def format_observation(self, observation: Any) -> str:
        return to_text(observation) + "\n"

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
    """FrozenLake-v1 and CliffWalking-v1: the model reads its position and answers with a direction."""

    system_prompt = "You walk on a grid. Answer up, right, down or left."

    def format_observation(self, observation: Any) -> str:
        row, column = divmod(int(observation), COLUMNS[int(self.observation_space.n)])
        return f"You stand in row {row}, column {column}."

    def extract_action(self, text: str) -> int:
        return self._directions().index(text.strip().strip(".").lower())

    def format_action(self, action: Any) -> str:
        return self._directions()[int(action)]

    def _directions(self) -> tuple[str, ...]:
        return CLIFF if int(self.observation_space.n) == 48 else LAKE
