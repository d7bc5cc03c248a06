"""Tools with a state, as TRL's `environment_factory` has them: a class whose methods are the tools of one episode."""

import inspect
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError, represent
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.envs.conversation import Conversation
from lmgym.envs.step_checks import plain, reward_number
from lmgym.envs.tools.schema import prepare
from lmgym.processes.coroutines import result_of
from lmgym.types import Example, Message, RecipeText

OWN = ("reset", "get_reward", "close")  # methods that are no tools
LONGEST = 500  # characters of a noted text


@register("env", "environment_factory")
@dataclass(kw_only=True)
class EnvironmentFactory(Conversation):
    """A conversation whose tools are the public methods of an object that lives as long as the episode.

    `factory` is "module:name" of a class or function without arguments that makes the object, as TRL's
    `environment_factory`. Its method `reset` is called with the columns of the example that it names (all, with
    **keywords), and may return a text, which is appended to the last message of the user. Its method `get_reward`, if
    it has one, pays the end of the episode; it is not asked where the results of a turn no longer fit the model's
    context, so that such an episode earns nothing more. Its public attributes that are numbers or short texts are noted
    after each turn (`Step.info`); a reward function of TRL gets them as `environments`. The other keys are those of
    `conversation`; `tools` are added to the methods.

    Source: TRL 1.16, GRPOTrainer. There a reward function gets the object itself.

    Example:
        >>> env = EnvironmentFactory(factory="my_game:Counter")      # with a method add(self, number: int) -> int
        >>> env.reset(Example("a/0", "Count to three."), seed=0)[-1]["content"]
        'Count to three. You are at 0.'
    """

    factory: str = ""
    _begun = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factory:
            raise LmgymError("key 'env.factory' is missing; write factory: my_module:MyEnvironment")
        make = registry.load_attribute(self.factory, "key 'env.factory'")
        if not callable(make):
            raise LmgymError(f"key 'env.factory': {self.factory} is no class and no function")
        self._object = make()
        if not callable(getattr(self._object, "reset", None)):
            raise LmgymError(f"key 'env.factory': what {self.factory} makes has no method reset")
        self._begun, self._earned = False, getattr(self._object, "get_reward", lambda: 0.0)
        for name, _ in inspect.getmembers(type(self._object), inspect.isfunction):
            if name.startswith("_") or name in OWN:
                continue
            if name in self._tools:
                raise LmgymError(f"key 'env.tools': '{name}' is a method of {self.factory} too; leave it out")
            self._tools[name] = prepare(getattr(self._object, name))

    def reset(self, example: Example, seed: int) -> list[Message]:
        """Begin: the prompt, with what the object's `reset` has to say behind the user's last message."""
        messages = [dict(message) for message in super().reset(example, seed)]
        columns = {**example.meta, "prompt": example.prompt}
        takes = inspect.signature(self._object.reset).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            columns = {key: columns[key] for key in takes if key in columns}
        said = result_of(self._object.reset(**columns))
        if said is not None:
            if not isinstance(said, str):
                raise TypeError(f"reset() of {self.factory} returned {represent(said)}; it must return a text or None")
            messages[-1]["content"] = RecipeText.join(messages[-1]["content"], said)
            self._history = [dict(message) for message in messages]
        self._begun = True
        return [*messages]

    def step(self, text: str, stop: str) -> Any:
        """A turn of the conversation, with the object's notes, and at the end its reward."""
        step = super().step(text, stop)
        if inspect.isawaitable(step) or inspect.iscoroutinefunction(self._earned):
            return self._later(step)
        return self._noted(step, self._earned() if step.over else 0.0)

    def close(self) -> None:
        super().close()
        if self._begun and callable(end := getattr(self._object, "close", None)):
            end()
        self._begun = False

    async def _later(self, step: Any) -> Step:
        known: Step = await step if inspect.isawaitable(step) else step
        earned = self._earned() if known.over else 0.0
        return self._noted(known, await earned if inspect.isawaitable(earned) else earned)

    def _noted(self, step: Step, earned: Any) -> Step:
        public = {name: value for name, value in vars(self._object).items() if not name.startswith("_")}
        notes = {name: plain(value) for name, value in public.items() if not getattr(value, "ndim", 0)}  # no boards
        kept = {name: value for name, value in notes.items() if _is_plain(value)}
        return replace(step, reward=step.reward + reward_number(earned), info={**step.info, **kept})


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST
    return isinstance(value, numbers.Real) and math.isfinite(value)
