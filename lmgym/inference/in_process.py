"""The engine `sampler`: lmgym's own, in the training process."""

from lmgym.core.registry import register
from lmgym.inference.base import Engine
from lmgym.inference.kinds import EngineKind, EngineSection, Place, ahead_words, unit_sentence
from lmgym.inference.pool.pool import Here, InUnits
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy


@register("engine", "sampler")
class SamplerKind(EngineKind):
    """lmgym's own sampler, in the training process."""

    shares_weights = True

    def check_pictures(self, section: EngineSection, architecture: str) -> None:
        """It reads those of every architecture."""

    def sentence(self, section: EngineSection, unit: int | None, threads: int | None) -> str:
        return f"engine: sampler in this process, {unit_sentence(unit)}{ahead_words(section)}"

    def open(self, section: EngineSection, policy: Policy, place: Place) -> Engine[Policy]:
        return make_engine(section, policy, place.unit)


def make_engine(section: EngineSection, policy: Policy, unit: int | None = None) -> Sampler | InUnits:
    """An engine in this process that samples from the policy, as any engine of the recipe would."""
    sampler, unit = Sampler(policy, section.rows, section.captured), unit or section.unit
    return sampler if unit is None else InUnits(policy, Here(sampler), unit, section.rows)
