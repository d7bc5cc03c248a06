"""check_env: a test of the contract of environments, for authors of environments."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import check_arguments
from lmgym.envs.base import Env, Step
from lmgym.envs.env_worker import to_json
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.types import Example

MAX_TURNS = 50  # of one episode
SAMPLE_TEXTS = (
    "1",
    "",
    "The answer is: 18\n#### 18",
    " hit\n",
    "\u00e9t\u00e9 \U0001f600 \u0661",
    '{"name": "nothing", "arguments": {}}',
    "<<9**9**9=",
    "no action here " * 200,
)


def check_env(
    env: str | Callable[[], Env],
    example: Example | None = None,
    texts: Sequence[str] = SAMPLE_TEXTS,
    seed: int = 0,
    **arguments: Any,
) -> str:
    """Say what was checked of an environment. Raises LmgymError, with one sentence, if it breaks its contract.

    `env` is a registered name with its `arguments`, or a function that builds an environment. Several episodes are
    played: each begins with another one of `texts` and goes on with the rest. Checked are:
    - reset returns a text or messages; step returns a Step with a finite reward; no text makes them raise;
    - two environments with the same seed give the same answers, turn by turn;
    - returned values do not change later, so no episode holds a reference to the environment's state;
    - all values are text and numbers (JSON), which can be sent to another process and written to a file.

    Example:
        >>> check_env("gymnasium", id="Blackjack-v1", agent="blackjack")
        "environment 'gymnasium' keeps its contract in 8 episodes of 3 to 6 turns, each played twice ..."
    """
    if isinstance(env, str):
        name, made = env, registry.get("env", env)
        arguments = check_arguments(made, arguments, "env", given=0)
        _check_json(name, "its arguments", arguments)
        make: Callable[[], Env] = lambda: made(**arguments)  # noqa: E731
    else:
        name, make = getattr(env, "__name__", type(env).__name__), env
        if arguments:
            raise LmgymError("check_env: arguments go with a registered name; bind them with functools.partial")
    example = example or Example("check/0", "What is 9 * 2?", ("9 * 2 = 18\n#### 18",), {"answer": "18"})
    turns = list[int]()
    for start in range(len(texts)):
        actions = [texts[(start + turn) % len(texts)] for turn in range(MAX_TURNS)]
        first, second = (_play(name, make, example, seed, actions) for _ in range(2))
        for turn, (answer, repeated) in enumerate(zip(first, second, strict=False)):
            if answer != repeated:
                raise LmgymError(
                    f"environment '{name}': two of one seed differ {_when(turn)}: {answer} and {repeated}; it must be "
                    "a function of (example, seed, actions)"
                )
        turns.append(len(first) - 1)
    return (
        f"environment '{name}' keeps its contract in {len(turns)} episodes of {min(turns)} to {max(turns)} turns, each "
        f"played twice with seed {seed}: no text made it fail, the rewards are finite, both times its answers were the "
        "same, none changed later, and all can be written as JSON"
    )


def _play(name: str, make: Callable[[], Env], example: Example, seed: int, texts: list[str]) -> list[dict[str, Any]]:
    """The answers of one episode, as JSON values."""
    envs, returned = InProcess(make), list[tuple[Any, dict[str, Any]]]()
    answer: Any = envs.begin([(0, example, seed)])[0]
    for turn, text in enumerate(["", *texts]):
        if turn:
            answer = envs.step([(0, text, "eos")])[0]
        if isinstance(answer, EnvFailure):
            cause = f" (after {text[:50]!r})" if turn else ""
            raise LmgymError(f"environment '{name}' failed {_when(turn)}{cause}: {answer.message}")
        assert isinstance(answer, Opening | Step)
        _check_json(name, _when(turn), to_json(answer))
        returned.append((answer, copy.deepcopy(to_json(answer))))
        if isinstance(answer, Step) and answer.over:
            break
    envs.end([0])
    # The copies, made when each answer was returned, show whether it has changed since.
    for turn, (answer, then) in enumerate(returned):
        if to_json(answer) != then:
            raise LmgymError(
                f"environment '{name}': what it returned {_when(turn)} was changed later; return a copy of its "
                "state, not the state itself"
            )
    return [then for _, then in returned]


def _when(turn: int) -> str:
    return f"in step {turn}" if turn else "in reset"


def _check_json(name: str, where: str, tree: Any) -> None:
    try:
        json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"environment '{name}': {where} holds a value that is neither text nor number ({error}); it must "
            "be sent to other processes and written to files"
        ) from error
