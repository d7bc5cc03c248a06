"""Which examples a step sees: data order as a pure function of the step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lmgym import seeds
from lmgym.episode import Example
from lmgym.errors import LmgymError


@dataclass(frozen=True)
class Stream:
    """Data order as a pure function of (seed, draw, step): nothing to save, nothing to restore.

    Every example comes once per epoch, each epoch in its own order. A step may span epochs, so
    `prompts_per_step` may exceed the number of examples and need not divide it. With a `priority_scale` above 0 there
    are no epochs: each prompt is drawn by itself, as `priorities` says of the examples' meta["weight"] (1 where there
    is none).

    Example:
        >>> stream = Stream(load("gsm8k", "train", path="data/gsm8k"), seed=0, prompts_per_step=16)
        >>> [example.id for example in stream.at(step=3)]
    """

    examples: Sequence[Example]
    seed: int
    prompts_per_step: int
    priority_scale: float = 0.0
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.examples:
            raise LmgymError("a stream needs at least one example; the list is empty")
        if self.prompts_per_step < 1:
            raise LmgymError(f"prompts_per_step must be at least 1, not {self.prompts_per_step}")
        if self.priority_scale:
            self._priorities()  # an example that cannot be weighed shows now

    def at(self, step: int, draw: int = 0) -> list[Example]:
        """The `prompts_per_step` examples of this step; a second `draw` of a step has an order of its own."""
        first = step * self.prompts_per_step
        if self.priority_scale:
            key = seeds.key(self.seed, "data", draw, "priority")
            chances = seeds.uniforms([key], first, self.prompts_per_step)[0]
            places = np.searchsorted(self._priorities().cumsum(), chances, side="right")
            return [self.examples[min(int(place), len(self.examples) - 1)] for place in places]
        return [self.examples[self._index(position, draw)] for position in range(first, first + self.prompts_per_step)]

    def _index(self, position: int, draw: int) -> int:
        epoch, place = divmod(position, len(self.examples))
        order = self._orders.get((draw, epoch))
        if order is None:
            order = seeds.permutation(len(self.examples), self.seed, "data", draw, epoch).tolist()
            if len(self._orders) > 3:  # a cache only: what is gone is computed again
                self._orders.clear()
            self._orders[draw, epoch] = order
        return order[place]

    def _priorities(self) -> np.ndarray:
        weights = [example.meta.get("weight", 1.0) for example in self.examples]
        for example, weight in zip(self.examples, weights, strict=True):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise LmgymError(f"example '{example.id}' has the weight {weight!r}; priorities need a number above 0")
        return priorities(weights, self.priority_scale)


def priorities(weights: Sequence[float], scale: float) -> np.ndarray:
    """Chances [N] of N examples to be drawn: proportional to weight ** scale (RL4LMs' PrioritySampler).

    Example:
        >>> priorities([1, 2, 4], 0.5).round(4).tolist()
        [0.2265, 0.3204, 0.4531]
    """
    raised = np.asarray(weights, dtype=np.float64) ** scale
    return raised / raised.sum()
