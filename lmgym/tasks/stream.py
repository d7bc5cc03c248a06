"""`Stream`: the examples of each training step. The data order is a pure function of seed and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.tasks.streamed import in_memory
from lmgym.types import Episode, Example


@dataclass(frozen=True)
class Stream:
    """The order of the training data, a pure function of (seed, draw, step). So a checkpoint stores nothing of it.

    Every example occurs once per epoch, and each epoch has its own order, or without `shuffle` that of the examples. A
    step may span epochs, so `prompts_per_step` may exceed the number of examples and need not divide it. With a
    `priority_scale` above 0 there are no epochs: each prompt is drawn independently, with the probabilities of
    `priorities` for the examples' meta["weight"] (default 1).

    For a mixture of tasks (see mixture.py) each task has its own stream, and the streams are interleaved evenly by
    weight (see `mixture_slot`), unless `interleave` is off. So each task keeps its own epochs, in the same order as
    without the mixture.

    Example:
        >>> stream = Stream(load_task("gsm8k", "train", path="data/gsm8k"), seed=0, prompts_per_step=16)
        >>> [example.id for example in stream.at(step=3)]
    """

    examples: Sequence[Example]
    seed: int
    prompts_per_step: int
    priority_scale: float = 0.0
    interleave: bool = True
    shuffle: bool = True
    _orders: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of each draw the newest epoch that was asked for, and its order: only a cache."""
    _members: dict[str, "Stream"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sums: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)
    """With priorities: the cumulative probabilities [examples]."""

    def __post_init__(self) -> None:
        if not self.examples:
            raise LmgymError("a stream needs at least one example; the list is empty")
        if self.prompts_per_step < 1:
            raise LmgymError(f"prompts_per_step must be at least 1, not {self.prompts_per_step}")
        if self.priority_scale:
            refusal = "priority_scale needs the weights of all examples; remove it, or task.streaming"
            object.__setattr__(self, "examples", in_memory(self.examples, refusal))
            object.__setattr__(self, "_sums", self._priorities().cumsum())
        for task in weights_of(self.examples[0]) if self.interleave else ():
            own = [example for example in self.examples if example.meta.get("task") == task]
            if not own:
                raise LmgymError(
                    f"no example of the mixture's task '{task}' is left; raise task.limit, if there is one, or take "
                    "the task out, if task.unfit has left out all of its rows"
                )
            self._members[task] = Stream(
                own, self.seed, self.prompts_per_step, self.priority_scale, interleave=False, shuffle=self.shuffle
            )

    def at(self, step: int, draw: int = 0) -> list[Example]:
        """The `prompts_per_step` examples of a step. A further `draw` in the same step has its own order; without
        `shuffle` it has the examples that come next."""
        ahead = 0 if self.shuffle else draw
        return self._take((step + ahead) * self.prompts_per_step, self.prompts_per_step, draw)

    def example(self, position: int) -> Example:
        """The example at a position of the endless sequence that first draws go through."""
        return self._take(position, 1, 0)[0]

    def observe(self, episodes: Sequence[Episode]) -> None:
        """All answers of a step are there. A stream does not look at them; a curriculum does."""

    def advance(self) -> None:
        """The step is done."""

    def metrics(self) -> dict[str, float]:
        """What a step's record says of the data."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON: what the order depends on besides seed, draw and step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def _take(self, first: int, count: int, draw: int) -> list[Example]:
        """The examples at the positions `first` to `first + count - 1` of this draw's endless sequence."""
        # A mixture: find the task of each position, and the position in that task's own stream.
        if self._members:
            weights = weights_of(self.examples[0])
            own = draw if self.shuffle else 0  # else a further draw goes on in the same sequence
            key = seeds.key(self.seed, "data", own, "mixture")
            slots = [mixture_slot(position, [*weights.values()], key) for position in range(first, first + count)]
            tasks = [*weights]
            return [self._members[tasks[member]]._take(index, 1, draw)[0] for member, index in slots]
        # Priorities: one uniform number per position, looked up in the cumulative probabilities.
        if self._sums is not None:
            key = seeds.key(self.seed, "data", draw, "priority")
            uniforms = seeds.uniforms([key], first, count)[0]
            indices = np.searchsorted(self._sums, uniforms, side="right")
            return [self.examples[min(int(index), len(self.examples) - 1)] for index in indices]
        # Epochs: a permutation for each.
        return [self.examples[self._index(position, draw)] for position in range(first, first + count)]

    def _index(self, position: int, draw: int) -> int:
        """The index of the example at a position of the sequence of epochs."""
        epoch, index = divmod(position, len(self.examples))
        if not self.shuffle:
            return index
        cached, order = self._orders.get(draw, (-1, None))
        if order is None or cached != epoch:
            order = seeds.permutation(len(self.examples), self.seed, "data", draw, epoch)
            self._orders[draw] = epoch, order
        return int(order[index])

    def _priorities(self) -> np.ndarray:
        """The probabilities of the examples. Raises LmgymError for a weight that is not a positive finite number."""
        weights = [example.meta.get("weight", 1.0) for example in self.examples]
        for example, weight in zip(self.examples, weights, strict=True):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise LmgymError(f"example '{example.id}' has the weight {weight!r}; priorities need a number above 0")
        return priorities(weights, self.priority_scale)


def mixture_slot(position: int, weights: Sequence[float], key: int = 0) -> tuple[int, int]:
    """The member of a mixture at a position of the endless sequence, and how many positions it had before:
    (member, index).

    Member 0 takes floor(t a + u) of the first t positions; a is its weight / the sum of all weights, and u in [0, 1)
    comes from `key`. Member 1 takes its part of the remaining positions in the same way, with a relative to the
    remaining weights, and so on. So among the first t positions member m has its proportional number to within m + 1.
    The result is computed from the position alone, without counting, in exact fractions.

    Example:
        >>> [mixture_slot(position, [2, 1]) for position in range(6)]
        [(1, 0), (0, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
    """
    exact = [Fraction(weight) for weight in weights]
    index = position  # among the positions that the members so far did not take
    for member in range(len(exact) - 1):
        rate = exact[member] / sum(exact[member:])
        offset = seeds.key(member, parent=key) % rate.denominator  # u = offset / denominator
        before = (index * rate.numerator + offset) // rate.denominator  # floor(t a + u), in whole numbers
        # The position is this member's if the floor grows here.
        if ((index + 1) * rate.numerator + offset) // rate.denominator > before:
            return member, before
        index -= before
    return len(exact) - 1, index


def weights_of(example: Example) -> Mapping[str, float]:
    """The weights, by task, of the mixture that an example belongs to; empty if it belongs to none."""
    mixture = example.meta.get("mixture")
    return mixture if isinstance(mixture, Mapping) and example.meta.get("task") in mixture else {}


def priorities(weights: Sequence[float], scale: float) -> np.ndarray:
    """Probabilities [N] of drawing each of N examples, proportional to weight ** scale (RL4LMs' PrioritySampler).

    Example: priorities([1, 2, 4], 0.5).round(4).tolist() -> [0.2265, 0.3204, 0.4531]"""
    raised = np.asarray(weights, dtype=np.float64) ** scale
    return raised / raised.sum()
