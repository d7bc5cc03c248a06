"""Which examples a step sees: data order as a pure function of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.types import Example


@dataclass(frozen=True)
class Stream:
    """Data order as a pure function of (seed, draw, step): nothing to save, nothing to restore.

    Every example comes once per epoch, each epoch in its own order. A step may span epochs, so
    `prompts_per_step` may exceed the number of examples and need not divide it. With a `priority_scale` above 0 there
    are no epochs: each prompt is drawn by itself, as `priorities` says of the examples' meta["weight"] (1 where there
    is none).

    Examples of a mixture of tasks (see mixture.py) come from one stream a task, interleaved by weight as evenly as can
    be (see `turn`), unless `interleave` is off. So each task keeps its own epochs, in the order that it has when it is
    alone.

    Example:
        >>> stream = Stream(load_task("gsm8k", "train", path="data/gsm8k"), seed=0, prompts_per_step=16)
        >>> [example.id for example in stream.at(step=3)]
    """

    examples: Sequence[Example]
    seed: int
    prompts_per_step: int
    priority_scale: float = 0.0
    interleave: bool = True
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _members: dict[str, "Stream"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.examples:
            raise LmgymError("a stream needs at least one example; the list is empty")
        if self.prompts_per_step < 1:
            raise LmgymError(f"prompts_per_step must be at least 1, not {self.prompts_per_step}")
        if self.priority_scale:
            self._priorities()  # an example that cannot be weighed shows now
        for task in weights_of(self.examples[0]) if self.interleave else ():
            own = [example for example in self.examples if example.meta.get("task") == task]
            if not own:
                raise LmgymError(f"no example of the mixture's task '{task}' is left; raise task.limit")
            self._members[task] = Stream(own, self.seed, self.prompts_per_step, self.priority_scale, interleave=False)

    def at(self, step: int, draw: int = 0) -> list[Example]:
        """The `prompts_per_step` examples of this step; a second `draw` of a step has an order of its own."""
        return self._take(step * self.prompts_per_step, self.prompts_per_step, draw)

    def _take(self, first: int, count: int, draw: int) -> list[Example]:
        """The examples at `count` positions of this draw's endless sequence."""
        if self._members:
            weights = weights_of(self.examples[0])
            key = seeds.key(self.seed, "data", draw, "mixture")
            turns = [mixture_slot(position, [*weights.values()], key) for position in range(first, first + count)]
            tasks = [*weights]
            return [self._members[tasks[member]]._take(index, 1, draw)[0] for member, index in turns]
        if self.priority_scale:
            key = seeds.key(self.seed, "data", draw, "priority")
            chances = seeds.uniforms([key], first, count)[0]
            places = np.searchsorted(self._priorities().cumsum(), chances, side="right")
            return [self.examples[min(int(index), len(self.examples) - 1)] for index in places]
        return [self.examples[self._index(position, draw)] for position in range(first, first + count)]

    def _index(self, position: int, draw: int) -> int:
        epoch, index = divmod(position, len(self.examples))
        order = self._orders.get((draw, epoch))
        if order is None:
            order = seeds.permutation(len(self.examples), self.seed, "data", draw, epoch).tolist()
            if len(self._orders) > 3:  # a cache only: what is gone is computed again
                self._orders.clear()
            self._orders[draw, epoch] = order
        return order[index]

    def _priorities(self) -> np.ndarray:
        weights = [example.meta.get("weight", 1.0) for example in self.examples]
        for example, weight in zip(self.examples, weights, strict=True):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise LmgymError(f"example '{example.id}' has the weight {weight!r}; priorities need a number above 0")
        return priorities(weights, self.priority_scale)


def mixture_slot(position: int, weights: Sequence[float], key: int = 0) -> tuple[int, int]:
    """Whose turn it is at a position of an endless sequence, and how many turns it has had before: (member, place).

    Member 0 takes floor(t a + u) of the first t positions, with a its share of the weight and u in [0, 1) from `key`;
    member 1 takes that of what member 0 leaves, with its share of the other weights, and so on. So of the first t turns
    each has its share, to within one turn for itself and each member before it; nothing has to be counted, and the
    arithmetic is exact.

    Example:
        >>> [mixture_slot(position, [2, 1]) for position in range(6)]
        [(1, 0), (0, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
    """
    left = [Fraction(weight) for weight in weights]
    index = position
    for member in range(len(left) - 1):
        share = left[member] / sum(left[member:])
        offset = seeds.key(member, parent=key) % share.denominator
        before = (index * share.numerator + offset) // share.denominator
        if ((index + 1) * share.numerator + offset) // share.denominator > before:
            return member, before
        index -= before
    return len(left) - 1, index


def weights_of(example: Example) -> Mapping[str, float]:
    """The weights of the mixture that an example is from, by task; none where it is from none."""
    mixture = example.meta.get("mixture")
    return mixture if isinstance(mixture, Mapping) and example.meta.get("task") in mixture else {}


def priorities(weights: Sequence[float], scale: float) -> np.ndarray:
    """Chances [N] of N examples to be drawn: proportional to weight ** scale (RL4LMs' PrioritySampler).

    Example:
        >>> priorities([1, 2, 4], 0.5).round(4).tolist()
        [0.2265, 0.3204, 0.4531]
    """
    raised = np.asarray(weights, dtype=np.float64) ** scale
    return raised / raised.sum()
