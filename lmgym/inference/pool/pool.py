"""A pool of generators: rollouts are cut into units, and each unit is computed by whoever is free.

The bits do not depend on who computes a unit, nor on how many generators there are: one process that computes one unit
after the other (`InUnits` with `Here`) is the oracle of a pool on Ray (ray_generators.py)."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lmgym.inference.base import PAUSED, Completion, Request, Sampling
from lmgym.inference.pool.generator import Call, Generator
from lmgym.inference.pool.units import Units
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.types import Restriction


class Generators(Protocol):
    """Those who compute units."""

    def answer(self, calls: Sequence[Call]) -> Iterator[tuple[int, list[Completion]]]:
        """The place of each call and its completions, as they come."""

    def drop(self, units: Sequence[int]) -> None:
        """Free what is kept of units that are over."""

    def load(self, policy: Policy, version: int) -> None:
        """Use the policy's weights from now on; all units are over."""

    def restricted(self, restriction: Restriction, mask: Policy | None) -> "Generators":
        """These generators under a restriction of the tokens that they sample."""

    def kept(self) -> "Generators":
        """These generators with the weights that they were sent last, whatever `load` sends later."""

    def close(self) -> None:
        """End all of them."""


class Here:
    """One generator, in this process.

    Example: InUnits(policy, Here(Sampler(policy)), size=32)"""

    def __init__(self, sampler: Sampler) -> None:
        self.generator = Generator(sampler)

    def answer(self, calls: Sequence[Call]) -> Iterator[tuple[int, list[Completion]]]:
        for place, call in enumerate(calls):
            yield place, self.generator.answer(call)

    def drop(self, units: Sequence[int]) -> None:
        self.generator.drop(units)

    def load(self, policy: Policy, version: int) -> None:
        self.generator.load(policy, version)

    def restricted(self, restriction: Restriction, mask: Policy | None) -> "Here":
        return Here(self.generator.sampler.restricted(restriction, mask))

    def kept(self) -> "Here":
        """Its weights are the policy's own, which no copy keeps: ask before the next update."""
        return Here(self.generator.sampler.beside())

    def close(self) -> None:
        """Nothing to end."""


class InUnits:
    """An engine that cuts its calls into units of `size` answers, and has `generators` compute them.

    Up to `rows` answers of several turns are alive at once, in all units together.

    Example: InUnits(policy, Here(Sampler(policy)), size=32).generate(requests, Sampling(max_new_tokens=8))"""

    def __init__(self, policy: Policy, generators: Generators, size: int, rows: int = 256) -> None:
        self.policy, self.generators, self.rows = policy, generators, rows
        self.units = Units(size)
        self._over: dict[int, list[int]] = {}  # conversations that a unit's next call forgets

    @property
    def context(self) -> int | None:
        return self.policy.context

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, ended: Callable[[int, list[int]], None] | None = None
    ) -> list[Completion]:
        """One completion per request, in order. `ended` is called for all answers of a unit when it is finished."""
        parts = self.units.cut(requests)
        calls = [
            Call(
                part.unit,
                tuple(requests[place] for place in part.places),
                sampling,
                over=() if part.unit is None else tuple(self._over.pop(part.unit, ())),
            )
            for part in parts
        ]
        found: dict[int, Completion] = {}
        for number, completions in self.generators.answer(calls):
            for place, completion in zip(parts[number].places, completions, strict=True):
                found[place] = completion
                if ended is not None and completion.stop != PAUSED:
                    ended(place, [*requests[place].begun, *completion.ids])
        return [found[place] for place in range(len(requests))]

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "InUnits":
        """A copy of this engine that samples only tokens that are likely under `mask` (None: the policy itself). Make a
        new copy after each `load`."""
        other = copy.copy(self)
        other.generators = self.generators.restricted(restriction, mask)
        return other

    def kept(self) -> "InUnits":
        """This engine with the weights that were loaded last, whatever `load` brings later; its conversations are its
        own. Ask one of the two at a time."""
        return InUnits(self.policy, self.generators.kept(), self.units.size, self.rows)

    def forget(self, conversations: Sequence[int]) -> None:
        """Free what is cached of conversations that are over: at the unit's next call, or now if that is over too."""
        for unit, over in self.units.forget(conversations).items():
            self._over.setdefault(unit, []).extend(over)
        units = self.units.over([*self._over])
        for unit in units:
            del self._over[unit]
        if units:
            self.generators.drop(units)

    def load(self, policy: Policy, version: int) -> None:
        """Use the policy's weights from now on. Conversations do not go on."""
        self.policy = policy
        self.units.clear()
        self._over.clear()
        self.generators.load(policy, version)

    def release(self) -> None:
        """Nothing: the memory is that of other processes."""

    def close(self) -> None:
        """End the generators."""
        self.generators.close()
