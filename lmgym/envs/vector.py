"""Many environments behind one call, each with its own fate: one that fails costs its own episode.

`InProcess` runs them here, one after the other; `EnvProcesses` (env_processes.py) in other processes, with time limits.
Each is known by its place in the rollout.
"""

import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Env, Step
from lmgym.types import Example, Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Opening:
    """How an episode begins: the first prompt, the strings that end the policy's turns, and what the chat template is
    told besides (`tools`).

    Example: Opening("You hold 17; the dealer shows 6.")
    """

    prompt: str | Sequence[Message]
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    players: int = 1
    player: int = 0  # who begins
    learners: tuple[int, ...] = (0,)  # whose turns train


@dataclass(frozen=True)
class EnvFailure:
    """What an environment came to that failed.

    Example: EnvFailure("ValueError: no such move (at game.py:12)")
    """

    message: str


class Envs(Protocol):
    """Environments side by side. Answers come in the order of what was asked, whatever finishes first."""

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        """Build and reset one environment for each (place, example, seed)."""
        ...

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        """Take one turn in each: (place, text, why it stopped)."""
        ...

    def demonstrate(self, places: Sequence[int]) -> list[str | EnvFailure]:
        """What a demonstrator would say now in each."""
        ...

    def end(self, places: Sequence[int]) -> None:
        """Close these."""
        ...

    def close(self) -> None:
        """End everything that runs for them."""
        ...


class InProcess:
    """Environments of this process, without a time limit: for those that cannot hang, and for a debugger.

    An exception costs its own episode; an LmgymError, which says what the user has to mend, goes through.

    Example: collect(prompts, actor, sampling, path, InProcess(SingleTurn))
    """

    def __init__(self, make_env: Callable[[], Env]) -> None:
        self.make_env = make_env
        self.envs: dict[int, Env] = {}

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        return [guarded(partial(self._begin, *item)) for item in items]

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        return [guarded(partial(self._step, *item)) for item in items]

    def demonstrate(self, places: Sequence[int]) -> list[str | EnvFailure]:
        return [guarded(partial(demonstration, self.envs[index])) for index in places]

    def end(self, places: Sequence[int]) -> None:
        for index in places:
            env = self.envs.pop(index, None)
            guarded(getattr(env, "close", lambda: None))

    def close(self) -> None:
        self.end(list(self.envs))

    def _step(self, index: int, text: str, stop: str) -> Step:
        return checked(self.envs[index].step(text, stop))

    def _begin(self, index: int, example: Example, seed: int) -> Opening:
        self.envs[index] = self.make_env()
        return opening(self.envs[index], example, seed)


def opening(env: Env, example: Example, seed: int) -> Opening:
    """Reset an environment. Raises TypeError where the prompt is neither text nor messages."""
    prompt = env.reset(example, seed)
    if not isinstance(prompt, str):
        _check_messages(prompt)
    stop, template = tuple(getattr(env, "stop", ())), dict(getattr(env, "template", {}))
    players = getattr(env, "players", 1)
    learners = tuple(getattr(env, "learners", range(players)))
    return Opening(prompt, stop, template, players, getattr(env, "first", 0), learners)


def demonstration(env: Any) -> str:
    """What a demonstrator would say now. Raises LmgymError where the environment has none."""
    if not hasattr(env, "demonstrate"):
        raise LmgymError(
            f"{type(env).__name__} has no demonstrate(), so there is nothing that a supervised stage could imitate; "
            "write one that returns what a demonstrator would say now"
        )
    text = env.demonstrate()
    if not isinstance(text, str) or not text:
        raise TypeError(f"demonstrate() returned {text!r}; it must return a text")
    return text


def checked(step: Any) -> Step:
    """The step itself. Raises TypeError or ValueError, in one sentence, where it is none that a rollout can use."""
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}; it must return a Step")
    if isinstance(step.reward, bool) or not isinstance(step.reward, numbers.Real) or not math.isfinite(step.reward):
        raise ValueError(f"step() returned the reward {step.reward!r}; it must be a finite number")
    if not all(isinstance(value, numbers.Real) and math.isfinite(value) for value in step.others.values()):
        raise ValueError(f"step() pays the others {dict(step.others)!r}; they must be finite numbers")
    _check_messages(step.messages)
    if step.over:
        return step
    if (step.continuation is None) == (not step.messages):
        raise ValueError(
            "step() returned neither messages nor a continuation for an episode that goes on"
            if step.continuation is None
            else "step() returned messages and a continuation; the policy either hands over or goes on"
        )
    return step


def guarded(call: Callable[[], Any]) -> Any:
    """What the call returns, or EnvFailure with what it raised and where. An LmgymError goes through."""
    try:
        return call()
    except LmgymError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        location = f" (at {own.filename}:{own.lineno})" if own else ""
        return EnvFailure(f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ") + location)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages are {messages!r}; they must be a list of {{role, content}}")
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            raise TypeError(f"a message is {message!r}; it must hold a role and a text as content")
        if message.get("role") not in ROLES:
            raise ValueError(f"a message has the role {message.get('role')!r}; valid: {', '.join(ROLES)}")
