"""Many environments behind one call. An environment that fails costs its own episode only.

`InProcess` runs them in this process, one after the other, coroutines side by side; `EnvProcesses` (env_processes.py)
in other processes, with a time limit. Each environment has a number: the index of its episode in the rollout."""

import inspect
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lmgym.core.errors import LmgymError, describe, represent
from lmgym.core.validation import check_text
from lmgym.envs import step_checks
from lmgym.envs.base import Env, Heard, Step
from lmgym.envs.step_checks import check_demonstration, check_messages, check_size, check_step, plain
from lmgym.processes.coroutines import results_of
from lmgym.types import Example, Message


@dataclass(frozen=True)
class Opening:
    """The start of an episode: the first prompt, the strings that end the policy's turns, keyword arguments of the
    chat template (`tools`), and the seed of the first turn, if it is given (`Branch.sampling_seed`).

    Example: Opening("You hold 17; the dealer shows 6.")"""

    prompt: str | Sequence[Message]
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    players: int = 1
    player: int = 0  # the one who begins
    learners: tuple[int, ...] = (0,)  # players whose turns train
    sampling_seed: tuple[int, ...] = ()
    program: bool = False  # a program has asked: a prompt that cannot be read costs its own episode


@dataclass(frozen=True)
class EnvFailure:
    """The answer of an environment that failed.

    Example: EnvFailure("ValueError: no such move (at game.py:12)")"""

    message: str


class Envs(Protocol):
    """Several environments. Answers come in the order of the requests, whichever finishes first. They may have an
    attribute `spent`: the seconds that the newest `begin` or `step` of each one took, and `past`, how messages before
    a turn are cut (past.py)."""

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

    An exception costs one episode. An LmgymError, a mistake that the user can correct, is raised. Methods that are
    coroutine functions are begun in the order of the requests, and wait side by side, `seconds` at most. A class may
    have `step_batch(envs, texts, stops)`, which answers the actions of many environments at once, as its `step` would.

    Example: collect(prompts, actor, sampling, path, InProcess(SingleTurn))"""

    def __init__(self, make_env: Callable[[], Env], seconds: float | None = None) -> None:
        self.make_env, self.seconds = make_env, seconds
        self.envs: dict[int, Env] = {}
        self.spent: dict[int, float] = {}

    def begin(self, items: Sequence[tuple[int, Example, int]]) -> list[Opening | EnvFailure]:
        return self._ask([item[0] for item in items], [partial(self._reset, *item) for item in items], self._opening)

    def hear(self, index: int, turn: Heard) -> None:
        """Tell an environment that has a method `hear` of the tokens of the turn that its next step is about."""
        if hear := getattr(self.envs[index], "hear", None):
            hear(turn)

    def step(self, items: Sequence[tuple[int, str, str]]) -> list[Step | EnvFailure]:
        indices = [item[0] for item in items]
        if items and (together := getattr(type(self.envs[indices[0]]), "step_batch", None)):
            return self._step_together(together, items)
        calls = [partial(self._step, *item) for item in items]
        return self._ask(indices, calls, lambda index, step: check_step(step))

    def _step_together(
        self, step_batch: Callable[..., Any], items: Sequence[tuple[int, str, str]]
    ) -> list[Step | EnvFailure]:
        """What `step_batch` returns, one step for each; where it fails as a whole, the failure for each."""
        indices, texts, stops = zip(*items, strict=True)
        began = time.perf_counter()
        call = partial(step_batch, [self.envs[index] for index in indices], list(texts), list(stops))
        [found] = results_of([self._answer(indices[0], call, list)])
        if not isinstance(found, EnvFailure) and len(found) != len(items):
            raise LmgymError(f"step_batch returned {len(found)} steps for {len(items)} environments")
        each = [found] * len(items) if isinstance(found, EnvFailure) else found
        steps = self._ask(indices, [partial(_itself, one) for one in each], lambda index, one: _checked(one))
        self.spent |= dict.fromkeys(indices, time.perf_counter() - began)
        return steps

    def demonstrate(self, indices: Sequence[int]) -> list[str | EnvFailure]:
        calls = [partial(demonstrate_step, self.envs[index]) for index in indices]
        return self._ask(indices, calls, lambda index, text: check_demonstration(text))

    def end(self, indices: Sequence[int]) -> None:
        ended = [(index, self.envs.pop(index, None)) for index in indices]
        self._ask(indices, [getattr(env, "close", lambda: None) for _, env in ended], lambda index, result: result)
        for index in indices:
            self.spent.pop(index, None)

    def close(self) -> None:
        self.end(list(self.envs))

    def _reset(self, index: int, example: Example, seed: int) -> Any:
        self.envs[index] = self.make_env()
        return self.envs[index].reset(example, seed)

    def _step(self, index: int, text: str, stop: str) -> Any:
        return self.envs[index].step(text, stop)

    def _opening(self, index: int, prompt: Any) -> Opening:
        return opening_of(self.envs[index], prompt)

    def _ask(
        self, indices: Sequence[int], calls: Sequence[Callable[[], Any]], check: Callable[[int, Any], Any]
    ) -> list[Any]:
        """What the calls return, each one checked. A failure is its own call's answer."""
        return results_of(
            [self._answer(index, call, partial(check, index)) for index, call in zip(indices, calls, strict=True)]
        )

    def _answer(self, index: int, call: Callable[[], Any], check: Callable[[Any], Any]) -> Any:
        """The checked answer of one environment, or a coroutine of it."""
        began, process = time.perf_counter(), os.getpid()
        with _catching() as failed:
            answer = call()
            if os.getpid() != process:  # the environment has forked, and this is the child: it is no second trainer
                os._exit(0)
            if inspect.isawaitable(answer):
                return self._awaited(index, answer, check, began)
            failed.append(check(answer))
        self.spent[index] = time.perf_counter() - began
        return failed[0]

    async def _awaited(self, index: int, answer: Awaitable[Any], check: Callable[[Any], Any], began: float) -> Any:
        import asyncio

        with _catching() as failed:
            try:
                failed.append(check(await asyncio.wait_for(answer, self.seconds)))
            except TimeoutError:
                if self.seconds is None or time.perf_counter() - began < self.seconds:
                    raise  # the environment's own
                failed.append(EnvFailure(f"the environment did not answer within {self.seconds:g} s"))
        self.spent[index] = time.perf_counter() - began
        return failed[0]


def _itself(value: Any) -> Any:
    return value


def _checked(step: Any) -> Any:
    return step if isinstance(step, EnvFailure) else check_step(step)


def opening_of(env: Env, prompt: Any) -> Opening:
    """The start of an episode whose `reset` has returned this prompt. Raises TypeError for what is neither text nor
    messages, and for a `stop` that is no collection of texts."""
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
        check_size(len(prompt))
    else:
        check_messages(prompt)
    stop, template = _stop_of(env), dict(getattr(env, "template", {}))
    players, first = plain(getattr(env, "players", 1)), plain(getattr(env, "first", 0))
    learners = tuple(map(plain, getattr(env, "learners", range(players))))
    seed = tuple(map(plain, getattr(env, "sampling_seed", ())))
    return Opening(prompt, stop, template, players, first, learners, seed, getattr(env, "program", False) is True)


def _stop_of(env: Env) -> tuple[str, ...]:
    """The texts that end a turn. One text alone would be taken apart, and each of its letters would end one."""
    stop = getattr(env, "stop", None)
    texts = tuple(stop) if isinstance(stop, Iterable) else () if stop is None else (stop,)
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f'the environment\'s stop is {represent(stop)}; make it a tuple of texts, such as ("END",)')
    return texts


def demonstrate_step(env: Any) -> Any:
    """What the environment wants imitated now. Raises LmgymError if it has no demonstrate()."""
    if not hasattr(env, "demonstrate"):
        raise LmgymError(
            f"{type(env).__name__} has no demonstrate(), so a supervised stage has nothing to imitate; write one that "
            "returns the answer to imitate"
        )
    return env.demonstrate()


@contextmanager
def _catching() -> Iterator[list[Any]]:
    """If the body raises, an EnvFailure with the error and its line is put into the list. An LmgymError is raised."""
    answer: list[Any] = []
    try:
        yield answer
    except (LmgymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too
        frames = traceback.extract_tb(error.__traceback__)
        own = (__file__, step_checks.__file__)
        frame = next((frame for frame in reversed(frames) if frame.filename not in own), None)
        location = f" (at {frame.filename}:{frame.lineno})" if frame else ""
        answer.append(EnvFailure(describe(error) + location))
