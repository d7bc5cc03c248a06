"""The part of a pool that computes: the sampler of one process, with a cache of conversations for each unit."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy


@dataclass(frozen=True)
class Call:
    """What is asked of a unit: completions, after some of its conversations are over.

    Example: Call(unit=3, requests=requests, sampling=Sampling(), over=(17, 18))"""

    unit: int | None
    requests: tuple[Request, ...]
    sampling: Sampling
    over: tuple[int, ...] = ()


class Generator:
    """Answers calls with one sampler; the conversations of each unit are cached apart, as if it were alone.

    Example: Generator(Sampler(policy)).answer(Call(None, (Request((5, 6), key=1),), Sampling()))"""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.units: dict[int, Sampler] = {}

    def answer(self, call: Call, before: Sequence[Call] = ()) -> list[Completion]:
        """One completion per request. `before` are the unit's earlier calls: they are computed again if the unit is
        unknown here, so that its cache, and with it every bit that follows, is as it was."""
        if call.unit is None:
            return self.sampler.generate(call.requests, call.sampling)
        if call.unit not in self.units:
            self.units[call.unit] = self.sampler.beside()
            for earlier in before:
                self._compute(self.units[call.unit], earlier)
        return self._compute(self.units[call.unit], call)

    def drop(self, units: Sequence[int]) -> None:
        """Free what is cached of units that are over."""
        for unit in units:
            self.units.pop(unit, None)

    def load(self, policy: Policy, version: int) -> None:
        """Use the policy's weights from now on; all units are over."""
        self.units.clear()
        self.sampler.load(policy, version)

    @staticmethod
    def _compute(sampler: Sampler, call: Call) -> list[Completion]:
        sampler.forget(call.over)
        return sampler.generate(call.requests, call.sampling)
