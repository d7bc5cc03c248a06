"""Whether several ranks fit the memory of this machine, with whole weights or with parts, and what they exchange."""

from dataclasses import dataclass, replace
from typing import Literal

from lmgym.algorithms.base import Algorithm
from lmgym.config.schema import Config, Stage
from lmgym.config.together import check_together
from lmgym.core.errors import LmgymError
from lmgym.models.shapes import Shapes
from lmgym.training.planning.memory import parts_of, trained_parameters
from lmgym.training.planning.memory_table import MASTER, size

KEY = "distributed.sharding: fsdp"
LESS = (
    "lower policy.tokens_per_forward or engine.rows, take policy.activation_checkpointing, policy.lora_rank or "
    "policy.quantise, or a smaller model"
)


@dataclass(frozen=True)
class Needs:
    """Bytes that each rank takes at most in any stage: `own` as the recipe says, `other` with the other value of
    `distributed.sharding` (None: the recipe is then refused). `here` are the bytes of this machine's memory, or of one
    of its GPUs (None: it has none).

    Example: Needs(2, "cuda", here=80 * 2**30, sharded=False, own=139 * 2**30, other=70 * 2**30)"""

    ranks: int
    device: str
    here: int | None
    sharded: bool
    own: float
    other: float | None

    def together(self, each: float) -> float:
        """What must fit into `here`: on a CPU all ranks, on a GPU one of them."""
        return self.ranks * each if self.device == "cpu" else each

    def fits(self, each: float) -> bool:
        return self.here is None or self.together(each) <= self.here


def other_form(config: Config) -> Config | None:
    """The recipe with the other value of `distributed.sharding`; None if it is then refused."""
    sharding: Literal["none", "fsdp"] = "none" if config.distributed.sharding == "fsdp" else "fsdp"
    other = replace(config, distributed=replace(config.distributed, sharding=sharding))
    try:
        check_together(other)
    except LmgymError:
        return None
    return other


def fit_sentence(needs: Needs) -> str:
    """What the ranks take, whether this fits, and what the other value of `distributed.sharding` would change.

    Example: "each of 2 ranks takes 139.00 GiB, more than the 80.00 GiB of a GPU here; with distributed.sharding: fsdp
    it would be 70.00 GiB, which fits"
    """
    # 1. As the recipe says.
    fits, on_cpu, taken = needs.fits(needs.own), needs.device == "cpu", size(needs.together(needs.own))
    said = f"{needs.ranks} ranks take {taken} together" if on_cpu else f"each of {needs.ranks} ranks takes {taken}"
    if needs.here is not None:
        said += f"{', of the' if fits else ', more than the'} {size(needs.here)} {'' if on_cpu else 'of a GPU '}here"
    # 2. The other value, unless whole weights fit: nothing is simpler.
    other_fits = needs.other is not None and needs.fits(needs.other)
    if needs.other is not None and (needs.sharded or needs.here is None or not fits):
        other = size(needs.together(needs.other))
        said += f"; {'without' if needs.sharded else 'with'} {KEY} it would be {other}"
        if needs.here is not None:
            too = f", which fits{' too, and is simpler' if fits else ''}"
            said += too if other_fits else f", which does not fit{'' if fits else ' either'}"
    # 3. Neither fits.
    ranks = ", or take fewer ranks" if on_cpu else ", or take more ranks" if needs.sharded else ""
    return said if fits or other_fits else f"{said}; {LESS}{ranks}"


def exchange_sentence(config: Config, stage: Stage, shapes: Shapes, ranks: int) -> str:
    """The bytes that the ranks exchange to train; what they tell each other of their answers is little beside them.

    Example: "each step the ranks exchange 3.20 GiB of gradients"
    """
    gradients = MASTER * trained_parameters(config, stage, shapes)
    if parts_of(config, ranks) > 1:
        weights = size(MASTER * (shapes.parameters + shapes.adapter))
        return (
            f"each forward and each backward pass gathers {weights} of weights, each backward pass adds up "
            f"{size(gradients)} of gradients, and after each step the copies that sample gather {weights}"
        )
    if stage.algorithm.driver != Algorithm.driver:  # how often it adds up what is its own affair
        return f"each time that the ranks add up gradients, they exchange {size(MASTER * shapes.trained)}"
    steps = stage.algorithm.optimizer_steps
    times = f" ({steps} optimizer steps of {size(gradients)})" if steps > 1 else ""
    return f"each step the ranks exchange {size(steps * gradients)} of gradients{times}"
