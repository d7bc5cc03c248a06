"""The option `parallel` of a reward of texts: its calls run in the process pool, with a time limit.

Use it for slow metrics (METEOR, PARENT, TER on long texts), and for code that may never return on some text."""

import importlib
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from lmgym.core.errors import LmgymError, warn
from lmgym.core.registry import load_attribute
from lmgym.processes.pool import Failure, default_count, shared
from lmgym.types import Example

PIECES = 4  # pieces per process that a call is cut into; small pieces keep all processes busy when one text is slow


@dataclass(frozen=True)
class Parallel:
    """The settings of the option `parallel`.

    `processes` (default: one per core, at most 8) score texts at the same time. A text may take `seconds` of CPU time.
    A text that takes longer, raises or crashes is not judged (a Failure), or gets the value `failed`, with a warning;
    the other texts keep their values. If all texts of a call get that value, that is an error.

    Example: rewards: {meteor: {parallel: {processes: 4, seconds: 2}}}"""

    processes: int | None = None
    seconds: float = 5.0
    failed: float | None = None

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise LmgymError(f"parallel.processes is {self.processes}; it must be at least 1")
        if not 0 < self.seconds < math.inf or not math.isfinite(self.failed or 0.0):
            raise LmgymError(f"parallel needs finite numbers, seconds above 0: {self.seconds}, failed {self.failed}")


class BackgroundScorer:
    """Scores rows in a thread while the caller continues. Rows that arrive during a call are scored together in the
    next one. The thread ends when no row is waiting. Call `begin` and `finish` from the same thread."""

    thread: threading.Thread | None

    def __init__(self, ask: Callable[[Sequence[list[Any]]], list[Any]]) -> None:
        self.ask, self.waiting, self.known = ask, list[list[Any]](), dict[str, Any]()
        self.lock, self.thread = threading.Lock(), None

    def begin(self, row: list[Any]) -> None:
        with self.lock:
            self.waiting.append(row)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True)
                self.thread.start()

    def finish(self) -> dict[str, Any]:
        """Wait, then return the values of all rows since the last call, without rows whose scoring failed."""
        if (thread := self.thread) is not None:
            thread.join()
        known, self.known = self.known, {}
        return known

    def _run(self) -> None:
        while True:
            with self.lock:
                rows, self.waiting = self.waiting, []
                if not rows:
                    self.thread = None
                    return
            with suppress(Exception):  # the caller scores missing rows again, and then gets the error
                self.known |= dict(zip(map(json.dumps, rows), self.ask(rows), strict=True))


def in_parallel(
    function: Callable[..., Any], arguments: Mapping[str, Any], how: Parallel
) -> Callable[..., list[float | Failure]]:
    """Wrap a reward function so that worker processes compute `function(texts, examples, **arguments)`.

    The processes import the function by its name, so it must be in an importable module. A text's value must not
    depend on the other texts, as the contract of rewards demands. Raises LmgymError if the function cannot be imported,
    and for examples that cannot be written as JSON."""
    target, bound = f"{function.__module__}:{function.__qualname__}", dict(arguments)
    imported = getattr(sys.modules.get(function.__module__), function.__qualname__, None)
    if function.__module__.startswith("lmgym_plugin_") or imported is not function:
        raise LmgymError(f"parallel: processes cannot import '{target}'; put the reward into a module of its own")

    def ask(rows: Sequence[list[Any]]) -> list[float | Failure]:
        pool = shared("lmgym.rewards.running.parallel:score_rows", how.processes, setup=(function.__module__,))

        def work(pieces: Sequence[list[Any]], seconds: float) -> list[Any]:
            return pool.map([{"target": target, "arguments": bound, "rows": rows} for rows in pieces], seconds)

        # Several texts go into one request, since a request has a cost of its own.
        size = max(math.ceil(len(rows) / (PIECES * (how.processes or default_count()))), 1)
        pieces = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        values: list[float | Failure] = []
        for piece, result in zip(pieces, work(pieces, how.seconds * size), strict=True):
            if isinstance(result, Failure) and len(piece) == 1:
                values.append(result)
            elif isinstance(result, Failure):  # score each row of the piece alone, to find the one that fails
                alone = work([[row] for row in piece], how.seconds)
                values += [one if isinstance(one, Failure) else one[0] for one in alone]
            else:
                values += result
        return values

    scorer = BackgroundScorer(ask)

    def score(texts: Sequence[str], examples: Sequence[Example]) -> list[float | Failure]:
        rows = [[text, _example_json(example)] for text, example in zip(texts, examples, strict=True)]
        # Some rows were scored while others were still sampled (see rollouts/play.py); score the missing ones now.
        known = scorer.finish()
        missing = [row for row in rows if json.dumps(row) not in known]
        known |= dict(zip(map(json.dumps, missing), ask(missing) if missing else [], strict=True))
        values = [known[json.dumps(row)] for row in rows]
        if how.failed is None:
            return values
        _report(target, values, how.failed)
        return [how.failed if isinstance(value, Failure) else value for value in values]

    update_wrapper(score, function)
    score.begin = lambda text, example: scorer.begin([text, _example_json(example)])  # type: ignore[attr-defined]
    score.limits_itself = True  # type: ignore[attr-defined]
    score.keywords = bound  # type: ignore[attr-defined]  # base.check_examples reads them, as from a partial
    return score


def score_rows(item: Mapping[str, Any]) -> list[float]:
    """Runs in a worker: score the item's rows (text, example) with the function that its `target` names."""
    rows = [(text, Example.from_json(example)) for text, example in item["rows"]]
    function = load_attribute(item["target"], f"parallel: '{item['target']}'")
    values = function([text for text, _ in rows], [example for _, example in rows], **item["arguments"])
    return [float(value) for value in values]


score_rows.prepare = importlib.import_module  # type: ignore[attr-defined]  # once per worker, outside of the time limit


def _report(target: str, values: Sequence[float | Failure], failed: float) -> None:
    """Warn of texts without a value. Raises LmgymError if no text has one: then the function itself is at fault."""
    failures = [value for value in values if isinstance(value, Failure)]
    if len(failures) > 1 and len(failures) == len(values):
        raise LmgymError(f"no text could be scored in a process of its own; the first: {failures[0].message}")
    if failures:
        warn(
            f"{target}: {len(failures)} of {len(values)} texts could not be scored and count as {failed:g} "
            f"(the first: {failures[0].message})",
            stacklevel=3,
        )


def _example_json(example: Example) -> dict[str, Any]:
    try:
        return example.to_json()
    except (TypeError, ValueError) as error:
        raise LmgymError(
            f"parallel: example '{example.id}' is no JSON ({error}), so no process can be sent it"
        ) from error
