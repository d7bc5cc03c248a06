"""The engine `vllm`: vLLM in the training process, or on servers that run already."""

from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.inference.base import Engine
from lmgym.inference.kinds import EngineKind, EngineSection, Place, ahead_words
from lmgym.inference.vllm.engine import VLLM, Vllm
from lmgym.inference.vllm.here import Here
from lmgym.inference.vllm.pictures import check_pictures
from lmgym.inference.vllm.servers import Servers
from lmgym.models import lora
from lmgym.models.policy import Policy

WAIT = 600.0  # seconds for an answer, unless the recipe says otherwise
CACHE_GIB = 1.0  # in this process, likewise


@register("engine", "vllm")
class VllmKind(EngineKind):
    """vLLM: its random numbers are its own, and of the sets that it draws from only those of top_k come back."""

    reads = frozenset({"address", "seconds", "cache_gib"})
    seeded = parts = continues = any_kept_set = False
    most_ahead = 1

    def check(self, section: EngineSection) -> None:
        addresses = (section.address or "http://").split(",")
        if not all(address.strip().startswith(("http://", "https://")) for address in addresses):
            raise LmgymError(
                f"engine.address is {section.address}; vllm needs the address of each server, such as "
                "http://127.0.0.1:8000, or none to run in this process"
            )
        if section.address and section.cache_gib:
            raise LmgymError("engine.cache_gib is for vLLM in this process; remove it, or engine.address")
        if not section.address and section.seconds:
            raise LmgymError("engine.seconds is a limit of servers; remove it, or give engine.address")
        if not section.address and section.ahead:
            raise LmgymError(
                "engine.ahead: vLLM in the training process computes on the processors that the update needs; give the "
                "addresses of servers (engine.address)"
            )
        for key in ("unit", "captured"):
            if getattr(section, key):
                raise LmgymError(f"engine.{key}: vllm decides itself what is computed together; remove it")

    def check_pictures(self, section: EngineSection, architecture: str) -> None:
        check_pictures(architecture, here=not section.address)

    def check_installed(self, section: EngineSection) -> None:
        if not section.address and (found := availability_of("vllm")).runs == "no":
            raise LmgymError(f"engine.name: vLLM is not installed; {found.how}")

    def sentence(self, section: EngineSection, unit: int | None, threads: int | None) -> str:
        where = f"at {section.address}" if section.address else "in this process"
        return f"engine: vLLM {where}{ahead_words(section)}"

    def open(self, section: EngineSection, policy: Policy, place: Place) -> Engine[Policy]:
        """Says what vLLM cannot promise. Raises LmgymError for servers that do not do what they should."""
        self.check_installed(section)
        place.warn(
            "engine: vllm draws with random numbers of its own, so a second run with this seed differs, and a resumed "
            "run is not the uninterrupted one"
        )
        if not place.corrected:
            place.warn("engine: no importance weight corrects for vLLM's rounding; grpo has correction: truncated")
        vllm: Vllm
        if section.address:
            addresses = [address.strip() for address in section.address.split(",")]
            vllm = Servers(addresses, place.folder / "served", section.rows, section.seconds or WAIT, place.ranks)
        elif place.ranks.size > 1:
            raise LmgymError("engine.address: several ranks ask servers; give their addresses, or run without --ranks")
        else:
            vllm = Here(section.rows, int((section.cache_gib or CACHE_GIB) * 2**30))
        engine = VLLM(policy, vllm, section.rows, place.canary, place.ranks)
        if lost := lost_updates(policy, vllm):
            place.warn(lost)
        return engine


def lost_updates(policy: Policy, vllm: Vllm) -> str:
    """A warning where vLLM may hold merged adapters in bf16, rounded to nearest: most of what they have learned may be
    lost there, until the canary notices. Empty elsewhere, and where they are rounded stochastically."""
    remedy = vllm.instead_of_rounding(policy)
    if not remedy or not lora.has_adapter(policy.model) or policy.rounded is not None:
        return ""
    if policy.skeleton is None:  # weights that ranks share out are rounded to nearest only
        remedy = f"write policy.rounding: stochastic, or {remedy}"
    return (
        "engine: vLLM gets the adapters merged into the weights; where it holds these in bf16, an update of less than "
        "0.2 % of a weight is rounded away, and it samples with less than the adapters have learned; "
        f"{remedy} (docs/engines.md)"
    )
