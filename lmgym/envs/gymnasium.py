"""Any environment of gymnasium, as text."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from lmgym.core import registry
from lmgym.core.constraints import FINITE, PositiveInt
from lmgym.core.errors import LmgymError, describe, represent
from lmgym.core.registry import suggest
from lmgym.core.validation import Section
from lmgym.envs.agent import Agent, read_answer, to_text
from lmgym.envs.base import Step
from lmgym.envs.dialogue import Dialogue, validity
from lmgym.envs.filling import filled, from_row
from lmgym.envs.spaces import allowed, check_listed, possible
from lmgym.envs.step_checks import reward_number
from lmgym.pictures.store import shown
from lmgym.types import Example, Message


@registry.register("env", "gymnasium")
@dataclass(kw_only=True)
class Gymnasium(Section):
    """An episode of gymnasium.make(id, **arguments); an `Agent` translates observations and actions.

    An answer is invalid if `Agent.extract_action` raises an error that the answer may have caused, or returns a value
    outside of the action space, or one that the `action_mask` in the environment's info forbids. `Step.info` has
    `invalid` (0 or 1) and the reason. Then `on_invalid` decides: retry - the model is told so and answers again;
    penalty - the same, and the reward is -`invalid_penalty`; random - a random legal action is taken instead; end -
    the episode ends with that penalty. After `max_invalid` invalid answers in a row the episode ends with it in any
    case.

    Example: Gymnasium(id="Blackjack-v1", agent="blackjack")"""

    section = "env"

    id: str
    agent: str = "plain"
    """A registered agent, or "module:Class"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of gymnasium.make."""
    options: dict[str, Any] = field(default_factory=dict)
    """`options` of the environment's reset; a value "{name}" is taken from the example's meta, whose `options` go over
    these."""
    show: str = "{observation}"
    """What the policy reads before a turn: {observation} in the agent's words, {picture} as the environment draws it
    (render_mode: rgb_array), {actions} that are possible now (of a Discrete space), and another name in braces an entry
    of the environment's info."""
    picture_pixels: PositiveInt | None = None
    """The longest side of a {picture}; larger ones are made smaller."""
    memory: Literal["conversation", "observation"] = "conversation"
    """What the policy sees: the whole conversation, or only the present observation (each turn then has a new
    prompt)."""
    max_turns: PositiveInt | None = None
    """Most actions in an episode; it is then truncated. Without it, only the environment's own limit holds."""
    on_invalid: Literal["retry", "penalty", "random", "end"] = "penalty"
    invalid_penalty: Annotated[float, FINITE] = 1.0
    max_invalid: PositiveInt = 3

    needs_data = False  # the recipe needs no task
    workers = 2  # processes for these environments, unless the recipe sets env.workers

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_id(self.id)
        _check_arguments(self.id, self.arguments)
        make = registry.get("agent", self.agent)
        missing = [name for name in ("format_observation", "extract_action") if not callable(getattr(make, name, None))]
        if missing:
            raise LmgymError(f"env.agent: {self.agent} has no method {missing[0]}; derive it from lmgym.Agent")
        self._make_agent = make

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        self._env = _make(self.id, self.arguments)
        if "{picture}" in self.show and "render_mode" not in self.arguments and _draws(self._env):
            self._env.close()
            self._env = _make(self.id, {**self.arguments, "render_mode": "rgb_array"})
        self._agent: Agent = self._make_agent()
        self._agent.action_space, self._agent.observation_space = self._env.action_space, self._env.observation_space
        self._seed, self._seeded = seed % 2**31, False
        options = {**from_row(self.options, example, "env.options"), **example.meta.get("options", {})}
        self._observation, self._info = self._env.reset(seed=self._seed, **({"options": options} if options else {}))
        self._dialogue = Dialogue(self._agent, self.memory, self.max_turns, self._around)
        return self._dialogue.begin(self._observation)

    def step(self, text: str, stop: str) -> Step:
        self._dialogue.turns += 1
        action, reason = self._action(text)
        # An invalid answer ends the episode, is answered by a message, or becomes a random action.
        if reason and (self.on_invalid != "random" or self._dialogue.invalid + 1 >= self.max_invalid):
            return self._dialogue.refuse(reason, self.on_invalid, self.invalid_penalty, self.max_invalid)
        self._dialogue.invalid = self._dialogue.invalid + 1 if reason else 0
        action = self._random_action() if reason else action
        # A legal action: let the environment take it.
        observation, reward, terminated, truncated, info = self._env.step(action)
        reward = reward_number(reward)
        if terminated or truncated:
            truncated = bool(truncated and not terminated)
            return Step(reward=reward, terminated=bool(terminated), truncated=truncated, info=validity(reason))
        self._observation, self._info = observation, info
        return self._dialogue.answer(self._dialogue.show(observation), reward, validity(reason))

    def demonstrate(self) -> str:
        text = self._agent.demonstrate(self._observation, self._random_action())
        if isinstance(text, str) and (reason := self._action(text)[1]):
            raise ValueError(
                f"agent '{self.agent}' demonstrates {represent(text)}, which its own extract_action does not take for "
                f"a legal action ({reason}); let its format_action write what extract_action reads"
            )
        return text

    def close(self) -> None:
        self._env.close()

    def _around(self, words: Callable[[], str]) -> str:
        """The observation's words as `show` has them."""
        if self.show == "{observation}":
            return words()
        if "actions" not in self._info:
            check_listed(self.show, self._env.action_space)
        actions = possible(self._env.action_space, self._info.get("action_mask"))
        written = ", ".join(map(self._agent.format_action, actions))
        observation = words() if "{observation}" in self.show else ""
        picture = self._picture() if "{picture}" in self.show else ""
        known = {"actions": written, **self._info, "observation": observation, "picture": picture}
        return filled(self.show, known, to_text, "env.show")

    def _picture(self) -> str:
        """What the environment draws; of one that draws nothing, the observation, if that is a picture."""
        import gymnasium

        try:
            drawn = self._env.render() if self._env.render_mode == "rgb_array" else self._observation
        except gymnasium.error.DependencyNotInstalled as error:
            raise LmgymError(f"env.show: '{self.id}' cannot draw a {{picture}}: {error}") from error
        try:
            return shown(drawn, self.picture_pixels)
        except LmgymError as error:
            raise LmgymError(
                f"env.show: '{self.id}' has no {{picture}}: it draws none with render_mode: rgb_array, and its "
                f"observation is none ({error})"
            ) from error

    def _action(self, text: str) -> tuple[Any, str]:
        """The legal action that a text means, or None and the reason."""
        space = self._env.action_space
        action, reason = read_answer(self._agent, text)
        if reason:
            return None, reason
        if inspect.isawaitable(action):
            raise TypeError(
                f"extract_action of agent '{self.agent}' is a coroutine function; it must be an ordinary one"
            )
        if isinstance(action, bool) or not space.contains(action):
            return None, "it is not one of the actions"
        if not allowed(space, action, self._info.get("action_mask")):
            return None, "it is not possible now"
        return action, ""

    def _random_action(self) -> Any:
        if not self._seeded:  # most episodes need no random action, and seeding takes as long as a game of Blackjack
            self._env.action_space.seed(self._seed)
            self._seeded = True
        mask = self._info.get("action_mask")
        return self._env.action_space.sample() if mask is None else self._env.action_space.sample(mask=mask)


def _make(name: str, arguments: dict[str, Any]) -> Any:
    import gymnasium

    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise LmgymError(f"env.id: '{name}' needs a package that is not installed: {error}") from error
    except Exception as error:  # the environment's own class judges its arguments
        raise LmgymError(f"env: gymnasium cannot make '{name}': {describe(error)}") from error


def _draws(env: Any) -> bool:
    """True for an environment that draws itself as an array, as its class says."""
    return "rgb_array" in (getattr(env, "metadata", None) or {}).get("render_modes", ())


def _check_id(name: str) -> None:
    """Raise LmgymError, with the nearest names, for an environment that gymnasium does not know. A name with a module
    ("package:Game-v0") is checked when the environment is made."""
    import gymnasium

    if ":" in name or name in gymnasium.registry:
        return
    raise LmgymError(f"env.id: gymnasium has no '{name}'; {_nearest(name, list(gymnasium.registry))}")


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Raise LmgymError for an argument that the environment's class does not have, before any stage is trained."""
    for argument in arguments:
        if (valid := _arguments_of(name)) is not None and argument not in valid:
            raise LmgymError(f"unknown key 'env.arguments.{argument}' of '{name}'; {suggest(str(argument), valid)}")


@cache
def _arguments_of(name: str) -> frozenset[str] | None:
    """What gymnasium.make takes for this environment; None if only making it can tell (an open **kwargs, a name with
    a module, a package that is not installed)."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    spec = gymnasium.registry.get(name)
    if spec is None or not isinstance(spec.entry_point, str):
        return None
    try:
        parameters = inspect.signature(load_env_creator(spec.entry_point)).parameters.values()
    except (ImportError, AttributeError, ValueError, TypeError, gymnasium.error.Error):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters) | {"max_episode_steps"}


def _nearest(name: str, ids: list[str]) -> str:
    hint = registry.suggest(name, ids)
    return hint if len(ids) < 20 else hint.split("Valid:")[0].strip() or f"it knows {len(ids)}, such as Blackjack-v1"
