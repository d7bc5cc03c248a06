"""check_env: whether an environment keeps its contract. For the tests of whoever writes one."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.validation import check_arguments
from lmgym.envs.base import Env, Step
from lmgym.envs.env_worker import plain
from lmgym.envs.vector import EnvFailure, InProcess, Opening
from lmgym.types import Example

MOST = 50  # turns of one episode that are looked at
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
) -> None:
    """Raise LmgymError, with one sentence, unless an environment keeps its contract.

    Held, over episodes that begin with each of `texts` and go on with the others: reset returns a text or messages,
    step a Step with a finite reward that goes on or ends; no text raises; two environments with one seed answer alike,
    turn by turn; what has been returned does not change afterwards, so that no episode holds a state that is still
    alive; everything is plain text and numbers (JSON), which can go to another process and to a file. `env` is a
    registered name with its `arguments`, or a function that builds one.

    Example:
        >>> check_env("gymnasium", id="Blackjack-v1", agent="blackjack")
    """
    if isinstance(env, str):
        name, made = env, registry.get("env", env)
        arguments = check_arguments(made, arguments, "env", given=0)
        _check_plain(name, "its arguments", arguments)
        make: Callable[[], Env] = lambda: made(**arguments)  # noqa: E731
    else:
        name, make = getattr(env, "__name__", type(env).__name__), env
        if arguments:
            raise LmgymError("check_env: arguments go with a registered name; bind them with functools.partial")
    example = example or Example("check/0", "What is 9 * 2?", ("9 * 2 = 18\n#### 18",), {"answer": "18"})
    for start in range(len(texts)):
        said = [texts[(start + turn) % len(texts)] for turn in range(MOST)]
        first, second = (_play(name, make, example, seed, said) for _ in range(2))
        for turn, (one, other) in enumerate(zip(first, second, strict=False)):
            if one != other:
                raise LmgymError(
                    f"environment '{name}': two of one seed differ {_when(turn)}: {one} and {other}; it must be a "
                    "function of (example, seed, actions)"
                )


def _play(name: str, make: Callable[[], Env], example: Example, seed: int, said: Sequence[str]) -> list[dict[str, Any]]:
    """What one episode answers, as plain values."""
    envs, returned = InProcess(make), list[tuple[Any, dict[str, Any]]]()
    answer: Any = envs.begin([(0, example, seed)])[0]
    for turn, text in enumerate(["", *said]):
        if turn:
            answer = envs.step([(0, text, "eos")])[0]
        if isinstance(answer, EnvFailure):
            what = f" (after {text[:50]!r})" if turn else ""
            raise LmgymError(f"environment '{name}' failed {_when(turn)}{what}: {answer.message}")
        assert isinstance(answer, Opening | Step)
        _check_plain(name, _when(turn), plain(answer))
        returned.append((answer, copy.deepcopy(plain(answer))))
        if isinstance(answer, Step) and answer.over:
            break
    envs.end([0])
    for turn, (answer, then) in enumerate(returned):
        if plain(answer) != then:
            raise LmgymError(
                f"environment '{name}': what it returned {_when(turn)} was changed later; return a copy and not the "
                "state that it goes on with"
            )
    return [then for _, then in returned]


def _when(turn: int) -> str:
    return f"in step {turn}" if turn else "in reset"


def _check_plain(name: str, where: str, tree: Any) -> None:
    try:
        json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"environment '{name}': {where} holds what is neither text nor number ({error}); it has to be sent to "
            "other processes and written to files"
        ) from error
