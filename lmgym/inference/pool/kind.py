"""The engine `pool`: generators on Ray."""

import math
from collections.abc import Iterable

from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.inference.base import Engine
from lmgym.inference.kinds import EngineKind, EngineSection, Place, Units, ahead_words, unit_sentence
from lmgym.inference.pool.pool import InUnits
from lmgym.models.policy import Policy

WORKERS = 2  # generators, unless the recipe says otherwise
WAIT = 600.0  # seconds for a unit, likewise


@register("engine", "pool")
class PoolKind(EngineKind):
    """Processes that Ray places, here or on a cluster."""

    reads = frozenset({"workers", "threads", "address", "seconds"})

    def check_pictures(self, section: EngineSection, architecture: str) -> None:
        """Its generators read those of every architecture, from the run's folder."""

    def check_installed(self, section: EngineSection) -> None:
        if (found := availability_of("lmgym[ray]")).runs == "no":
            raise LmgymError(f"engine.name: a pool needs Ray; {found.how}")

    def usual_units(self, section: EngineSection, threads: int, steps: Iterable[tuple[int, int]]) -> Units:
        """The largest step's answers, in a part of whole groups for each generator; their share of the threads."""
        workers = section.workers or WORKERS
        prompts, group = max(steps, key=math.prod)
        return -(-prompts // workers) * group, threads if section.address else max(1, threads // workers)

    def sentence(self, section: EngineSection, unit: int | None, threads: int | None) -> str:
        """Example: "engine: 2 generators on this machine, 1 thread each, units of 64 answers" """
        workers = section.workers or WORKERS
        generators = "1 generator" if workers == 1 else f"{workers} generators"
        where = f"on Ray at {section.address}" if section.address else "on this machine"
        each = f"{threads} thread{'s' if threads != 1 else ''} each"
        return f"engine: {generators} {where}, {each}, {unit_sentence(unit)}{ahead_words(section)}"

    def open(self, section: EngineSection, policy: Policy, place: Place) -> Engine[Policy]:
        """Of several ranks each has its share of the generators. Raises LmgymError if there are fewer than ranks."""
        self.check_installed(section)
        workers = len(range(place.ranks.rank, section.workers or WORKERS, place.ranks.size))
        if not workers:
            raise LmgymError(
                f"engine.workers: each of the {place.ranks.size} ranks needs a generator of its own; write more"
            )
        assert place.unit is not None and place.threads is not None
        from lmgym.inference.pool.ray_generators import RayGenerators

        how = (section.rows, section.captured, section.seconds or WAIT, section.address, place.warn)
        generators = RayGenerators(policy, workers, place.threads, *how, versions=section.ahead + 1)
        return InUnits(policy, generators, place.unit, section.rows)
