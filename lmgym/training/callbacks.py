"""Callbacks: a user's own code at each step, evaluation and checkpoint of a run, without owning the loop.

    callbacks: {"my_callbacks:Lengths": {shortest: 3}}

A name is "module:class"; what stands behind it are the arguments of the class, or nothing. Of several ranks the first
one alone has callbacks."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.batch import Batch
from lmgym.core import registry
from lmgym.core.errors import LmgymError, describe
from lmgym.types import Episode


@dataclass(frozen=True)
class StepEnd:
    """A step that has just updated the policy. `episodes` are all that were drawn, `batch` holds those that trained (on
    the CPU), `record` is what metrics.jsonl will say of the step. `step` counts from 0 in its stage.
    Example: end.batch.require("advantages")[end.batch.actions].abs().max()"""

    stage: str
    step: int
    episodes: Sequence[Episode]
    batch: Batch
    record: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationEnd:
    """An evaluation, when `step` steps of the stage were done: its answers and its record in metrics.jsonl.
    Example: end.record["final_answer"]"""

    stage: str
    step: int
    split: str
    episodes: Sequence[Episode]
    record: Mapping[str, Any]


class Callback:
    """What a run calls. Override what you need; the rest does nothing. Read what you are given, and leave it as it is.

    A callback that raises ends the run with one sentence that names it.

    Example: a metric of one's own, in metrics.jsonl and in all trackers
        >>> class Lengths(Callback):
        ...     def __init__(self, shortest: int = 1):
        ...         self.shortest = shortest
        ...     def on_step(self, end):
        ...         short = [len(one.text) < self.shortest for one in end.episodes]
        ...         return {"short": sum(short) / len(short)}
    """

    def on_step(self, end: StepEnd) -> Mapping[str, float] | None:
        """After each update, before it is logged. Returns numbers for the step's record, by names that it lacks."""
        return None

    def on_evaluation(self, end: EvaluationEnd) -> None:
        """After each evaluation, when it is logged."""

    def on_save(self, folder: Path) -> None:
        """After each checkpoint: `folder` is whole, and will be deleted when newer ones have come. What this changes in
        the callback's state is not in that checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the callback, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; called if a checkpoint holds a state of this callback."""


class Callbacks:
    """A run's callbacks by name, in the order of the recipe.

    Example: Callbacks({"my_callbacks:Lengths": Lengths()}).on_step(end)"""

    def __init__(self, named: Mapping[str, Callback] | None = None) -> None:
        self.named = dict(named or {})

    def on_step(self, end: StepEnd) -> dict[str, float]:
        """The numbers of all callbacks for the step's record. Raises LmgymError for a name that is taken already, and
        for what is no number."""
        found: dict[str, float] = {}
        for name, callback in self.named.items():
            where = f"callbacks: '{name}' in step {end.step + 1}"
            own = _call(where, partial(callback.on_step, end)) or {}
            if not isinstance(own, Mapping):
                raise LmgymError(f"{where}: on_step returned a {type(own).__name__}; return a dictionary of numbers")
            for key, value in own.items():
                if not isinstance(key, str):
                    raise LmgymError(f"{where}: a number's name is {key!r}; make it a text")
                if key in end.record or key in found:
                    raise LmgymError(f"{where}: the step's record has a '{key}' already; choose another name")
                found[key] = _number(f"{where}: '{key}'", value)
        return found

    def on_evaluation(self, end: EvaluationEnd) -> None:
        """Tell all callbacks of an evaluation."""
        for name, callback in self.named.items():
            _call(f"callbacks: '{name}' in the evaluation after step {end.step}", partial(callback.on_evaluation, end))

    def on_save(self, folder: Path) -> None:
        """Tell all callbacks of a checkpoint."""
        for name, callback in self.named.items():
            _call(f"callbacks: '{name}' at the checkpoint {folder.name}", partial(callback.on_save, folder))

    def state_dict(self) -> dict[str, Any]:
        """The states of those that have one, by name."""
        states = {name: _call(f"callbacks: '{name}'", one.state_dict) for name, one in self.named.items()}
        for name, state in states.items():
            _call(
                f"callbacks: '{name}': state_dict() must be plain JSON, and",
                partial(json.dumps, state, allow_nan=False),
            )
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each callback its state back. One that is new in the recipe has none."""
        for name, callback in self.named.items():
            if name in states:
                _call(f"callbacks: '{name}'", partial(callback.load_state_dict, states[name]))


def make_callbacks(section: Mapping[str, Any]) -> Callbacks:
    """Build the recipe's callbacks. Raises LmgymError for what is no callback, and for wrong arguments."""
    named: dict[str, Callback] = {}
    for name, arguments in section.items():
        kind = registry.load_attribute(name, f"callbacks: '{name}'")
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise LmgymError(f"callbacks: '{name}' is no subclass of lmgym.Callback; derive it from that class")
        if not isinstance(arguments, Mapping | None):
            raise LmgymError(f"callbacks: behind '{name}' stand its arguments, such as {{every: 10}}, or nothing")
        named[name] = _call(f"callbacks: '{name}'", partial(kind, **(arguments or {})))
    return Callbacks(named)


def _call(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except LmgymError as error:
        raise LmgymError(f"{where}: {error}") from error
    except Exception as error:
        raise LmgymError(f"{where} raised {describe(error)}") from error


def _number(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise LmgymError(f"{where} is a {type(value).__name__}; return a number") from error
    if not math.isfinite(number):
        raise LmgymError(f"{where} is {number}; return a finite number, or leave it out")
    return number
