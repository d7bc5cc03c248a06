"""`reasoning_gym`: the reasoning-gym library's own scores for its puzzles (see lmgym/tasks/reasoning_gym.py)."""

import ast
import importlib.util
import inspect
import re
import sys
import warnings
from functools import lru_cache
from typing import Any

from lmgym.core.errors import LmgymError, warn
from lmgym.core.registry import register
from lmgym.processes.pool import Failure, shared
from lmgym.rewards.foreign.reasoning_gym import last_tagged, restored
from lmgym.rewards.maths.final_answer import extract_answer
from lmgym.types import Example

MEMORY = 4.0  # GiB that a worker may take
LONGEST = 20_000  # characters of an answer
# Some data sets pass the answer to Python's eval, or to sympy's parse_expr, which calls eval. Model text must never be
# executed, so only plain expressions may get there: numbers, names, operators, lists, and calls of these functions.
FUNCTIONS = frozenset(str.split("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs factorial"))
HARMLESS = (  # syntax nodes that may always occur; `_checked` decides about calls and constants
    ast.Expression, ast.Name, ast.Load, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


@register("reward", "reasoning_gym")
def reasoning_gym(
    texts: list[str], examples: list[Example], *, strict: bool = False, seconds: float = 5.0, workers: int | None = None
) -> list[float]:
    """The library's score of the answer: 1 if it is right; many puzzles also give values between 0 and 1.

    The answer is the content of the last <answer>...</answer>. Without such tags, and unless `strict`, it is the
    announced answer ("#### 18", a box) or the whole text, whichever scores higher. With `strict` a text without tags
    scores as no answer, which is 0 or, in some data sets, 0.01.

    Scoring runs in separate processes. An answer that takes more than `seconds` of CPU time, or crashes, counts as 0,
    with a warning. If a data set would let Python evaluate the answer, only a plain expression counts as an answer.

    Raises LmgymError for an example of another task. Needs the extra lmgym[reasoning].

    Example: reasoning_gym(["<answer>73</answer>"], load_task("reasoning_gym", "test", dataset="chain_sum", limit=1))
    -> [1.0]"""
    for example in examples:
        if "entry" not in example.meta or "dataset" not in example.meta:
            raise LmgymError(f"reward 'reasoning_gym' is for the task of that name, and '{example.id}' is not of it")
    if importlib.util.find_spec("reasoning_gym") is None:
        raise LmgymError("reward 'reasoning_gym' needs the library: pip install 'lmgym[reasoning]'")
    items = [
        [example.meta["dataset"], example.meta["entry"], _answers(text, strict)]
        for text, example in zip(texts, examples, strict=True)
    ]
    values = shared("lmgym.rewards.reasoning_gym:best_score", workers, MEMORY).map(items, seconds)
    failures = [value for value in values if isinstance(value, Failure)]
    if failures:
        warn(
            f"reward 'reasoning_gym': {len(failures)} of {len(values)} answers could not be scored and count as 0 (the "
            f"first: {failures[0].message})",
            stacklevel=2,
        )
    return [0.0 if isinstance(value, Failure) else float(value) for value in values]


reasoning_gym.limits_itself = True  # type: ignore[attr-defined]  # no alarm is needed, see base.call_reward


def best_score(item: list[Any]) -> float:
    """Runs in a worker: the best score of the candidate answers. `item` is [data set, entry, answers]."""
    name, entry, answers = item
    dataset, evaluators = _dataset(name)
    entry = restored(entry)
    return max(float(dataset.score_answer(_checked(answer, evaluators), entry)) for answer in answers or [None])


def _prepare() -> None:
    """Runs once in a worker's supervisor: load the library."""
    import reasoning_gym  # noqa: F401

    warnings.simplefilter("ignore")


best_score.prepare = _prepare  # type: ignore[attr-defined]


def _answers(text: str, strict: bool) -> list[str]:
    """The candidates for the text's answer; the best of them counts."""
    tagged = last_tagged(text)
    answers = [] if tagged is None else [tagged]
    if tagged is None and not strict:
        answers = list(dict.fromkeys([extract_answer(text, strict=True) or text.strip(), text.strip()]))
    return [answer for answer in answers if len(answer) <= LONGEST]


@lru_cache(maxsize=128)
def _dataset(name: str) -> tuple[Any, frozenset[str]]:
    """A data set to score with, and the names of the evaluators (eval, parse_expr ...) that its source code calls."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(name, seed=0, size=1)
    source = inspect.getsource(sys.modules[type(dataset).__module__])
    return dataset, frozenset(re.findall(r"\b(eval|exec|parse_expr|sympify)\(", source))


def _checked(answer: str | None, evaluators: frozenset[str]) -> str | None:
    """The answer, or None if an evaluator could do more with it than arithmetic."""
    if answer is None or not evaluators:
        return answer
    by_sympy = bool(evaluators & {"parse_expr", "sympify"})
    try:
        tree = ast.parse(answer.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None if by_sympy else answer  # eval cannot run it either; sympy rewrites it first, so it might
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            harmless = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        elif isinstance(node, ast.Constant):
            harmless = not by_sympy or isinstance(node.value, int | float)  # sympy may evaluate the text of a string
        else:
            harmless = isinstance(node, HARMLESS)
        if not harmless:
            return None
    return answer
