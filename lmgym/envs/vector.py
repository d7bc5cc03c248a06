"""Many environments behind one call. An environment that fails costs its own episode only.

`InProcess` runs them in this process, one after the other; `EnvProcesses` (env_processes.py) in other processes, with a
time limit. Each environment has a number: the index of its episode in the rollout.
"""

import numbers
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError, describe, represent
from lmgym.core.validation import check_text
from lmgym.envs.base import Env, Step
from lmgym.types import Example, Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Opening:
    """The start of an episode: the first prompt, the strings that end the policy's turns, and keyword arguments of the
    chat template (`tools`).

    Example: Opening("You hold 17; the dealer shows 6.")
    """

    prompt: str | Sequence[Message]
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    players: int = 1
    player: int = 0  # the one who begins
    learners: tuple[int, ...] = (0,)  # players whose turns train


@dataclass(frozen=True)
class EnvFailure:
    """The answer of an environment that failed.

    Example: EnvFailure("ValueError: no such move (at game.py:12)")
    """

    message: str


class Envs(Protocol):
    """Several environments. Answers come in the order of the requests, whichever finishes first. They may have an
    attribute `spent`: the seconds that the newest `begin` or `step` of each one took."""

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        """Build and reset one environment for each (index, example, seed)."""
        ...

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        """Take one action in each: (index, text, why the turn stopped)."""
        ...

    def demonstrate(self, indices: Sequence[int]) -> list[str | EnvFailure]:
        """The answer to imitate now, in each."""
        ...

    def end(self, indices: Sequence[int]) -> None:
        """Close these."""
        ...

    def close(self) -> None:
        """Close all environments and end their processes."""
        ...


class InProcess:
    """Environments in this process, without a time limit: for environments that cannot hang, and for a debugger.

    An exception costs one episode. An LmgymError, a mistake that the user can correct, is raised.

    Example: collect(prompts, actor, sampling, path, InProcess(SingleTurn))
    """

    def __init__(self, make_env: Callable[[], Env]) -> None:
        self.make_env = make_env
        self.envs: dict[int, Env] = {}
        self.spent: dict[int, float] = {}

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        return [self._timed(item[0], partial(self._begin, *item)) for item in items]

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        return [self._timed(item[0], partial(self._step, *item)) for item in items]

    def demonstrate(self, indices: Sequence[int]) -> list[str | EnvFailure]:
        return [catch_failure(partial(demonstrate_step, self.envs[index])) for index in indices]

    def end(self, indices: Sequence[int]) -> None:
        for index in indices:
            env = self.envs.pop(index, None)
            self.spent.pop(index, None)
            catch_failure(getattr(env, "close", lambda: None))

    def close(self) -> None:
        self.end(list(self.envs))

    def _timed(self, index: int, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        answer = catch_failure(call)
        self.spent[index] = time.perf_counter() - began
        return answer

    def _step(self, index: int, text: str, stop: str) -> Step:
        return check_step(self.envs[index].step(text, stop))

    def _begin(self, index: int, example: Example, seed: int) -> Opening:
        self.envs[index] = self.make_env()
        return reset_env(self.envs[index], example, seed)


def reset_env(env: Env, example: Example, seed: int) -> Opening:
    """Reset an environment. Raises TypeError for a prompt that is neither text nor messages."""
    prompt = env.reset(example, seed)
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
    else:
        _check_messages(prompt)
    stop, template = tuple(getattr(env, "stop", ())), dict(getattr(env, "template", {}))
    players = getattr(env, "players", 1)
    learners = tuple(getattr(env, "learners", range(players)))
    return Opening(prompt, stop, template, players, getattr(env, "first", 0), learners)


def demonstrate_step(env: Any) -> str:
    """The answer to imitate now. Raises LmgymError if the environment has no demonstrate()."""
    if not hasattr(env, "demonstrate"):
        raise LmgymError(
            f"{type(env).__name__} has no demonstrate(), so a supervised stage has nothing to imitate; write one that "
            "returns the answer to imitate"
        )
    text = env.demonstrate()
    if not isinstance(text, str) or not text:
        raise TypeError(f"demonstrate() returned {represent(text)}; it must return a text")
    check_text(text, "what demonstrate() returned")
    return text


def _can_be_trained_on(value: Any) -> bool:
    size: Any = abs(value) if isinstance(value, numbers.Real) else None
    return size is not None and bool(size <= LARGEST_REWARD)  # False for nan too


def check_step(step: Any) -> Step:
    """The step itself. Raises TypeError or ValueError, with one sentence, for a step that a rollout cannot use."""
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}; it must return a Step")
    if isinstance(step.reward, bool) or not _can_be_trained_on(step.reward):
        raise ValueError(
            f"step() returned the reward {represent(step.reward)}; it must be a finite number within {LARGEST_REWARD:g}"
        )
    if not all(_can_be_trained_on(value) for value in step.others.values()):
        raise ValueError(
            f"step() pays the others {represent(dict(step.others))}; they must be finite numbers within "
            f"{LARGEST_REWARD:g}"
        )
    _check_messages(step.messages)
    if step.continuation is not None:
        check_text(step.continuation, "the continuation")
    if step.over:
        return step
    # An episode that goes on has either messages or a continuation.
    if (step.continuation is None) == (not step.messages):
        raise ValueError(
            "step() returned neither messages nor a continuation for an episode that goes on"
            if step.continuation is None
            else "step() returned messages and a continuation; the policy either hands over or goes on"
        )
    return step


def catch_failure(call: Callable[[], Any]) -> Any:
    """The result of the call; if it raises, an EnvFailure with the error and its line. An LmgymError is raised."""
    try:
        return call()
    except (LmgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename != __file__), None)  # not this module's
        location = f" (at {frame.filename}:{frame.lineno})" if frame else ""
        return EnvFailure(describe(error) + location)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages are {represent(messages)}; they must be a list of {{role, content}}")
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            raise TypeError(f"a message is {represent(message)}; it must hold a role and a text as content")
        if message.get("role") not in ROLES:
            raise ValueError(f"a message has the role {represent(message.get('role'))}; valid: {', '.join(ROLES)}")
        check_text(message["content"], "a message")
