"""The engines that a recipe can name. `EngineKind` says what an engine supports and opens it; nobody asks for its name.

A further engine is a file with a subclass, registered under its name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from lmgym.core import registry
from lmgym.core.constraints import FINITE, PositiveFloat, PositiveInt, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.validation import FREE, Section
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.inference.base import Engine
from lmgym.models.policy import Policy

Gap = Annotated[float, Gt(0), FINITE, Rule("it must be a number of nats above 0")]
Units = tuple[int | None, int | None]
MOST_AHEAD = 8
Seconds = Annotated[float, Gt(0), FINITE, Rule("it must be above 0 seconds")]


@dataclass(kw_only=True)
class EngineSection(Section):
    """The `engine:` section."""

    section = "engine"

    name: str = field(default="sampler", metadata=FREE)  # the units in machine.json make the bits
    """sampler: in the training process; pool: in processes of their own, which Ray places; needs lmgym[ray]; vllm: by
    vLLM, in the training process or on servers that run already (docs/engines.md)."""
    rows: PositiveInt = 256
    """Answers that are decoded side by side."""
    unit: PositiveInt | None = field(default=None, metadata=FREE)  # as `threads` of a recipe
    """Answers that are computed together, as one unit of a rollout: the bits depend on it, and not on who computes it.
    Default: the whole rollout; with a pool, one unit for each generator, chosen when the run begins."""
    workers: PositiveInt | None = field(default=None, metadata=FREE)
    """Generators of a pool. Default: 2."""
    threads: PositiveInt | None = field(default=None, metadata=FREE)
    """CPU threads of each generator of a pool. Default: the run's threads, shared out; chosen when the run begins."""
    address: str | None = field(default=None, metadata=FREE)
    """Address of a Ray cluster, as "10.0.0.1:6379" or "auto"; without it Ray is started on this machine. Of vLLM
    servers: "http://127.0.0.1:8000", several separated by commas; without it vLLM runs in the training process."""
    seconds: Seconds | None = field(default=None, metadata=FREE)
    """Longest time that a generator of a pool may take for a unit; then another one takes its place. Of vLLM the
    longest time for one answer. Default: 600."""
    cache_gib: PositiveFloat | None = field(default=None, metadata=FREE)
    """GiB for the keys and values of vLLM in the training process. Default: 1."""
    ahead: Annotated[int, Ge(0), Le(MOST_AHEAD)] = 0
    """Steps that are sampled ahead: those of step s come from the weights after s - ahead updates, so that a pool
    samples while the policy is updated. The algorithm must weigh answers of older weights (grpo: correction)."""
    chunk: PositiveInt | None = None
    """Tokens of an answer that one version of the weights samples before the next one goes on with it; the last of the
    `ahead` versions (2 or more) samples the rest (docs/ahead.md). Default: one version samples all of an answer."""
    captured: bool = False
    """Decoding steps of fixed shapes, which CUDA graphs replay; not measured on a GPU yet."""
    gap_at_load: Gap | None = field(default=None, metadata=FREE)
    """Nats per token that sampled and scored log-probabilities may differ from the model's own forward pass, on
    average, when it proves itself before training. Default: what the precision explains (docs/models_proof.md)."""
    gap_warning: Gap | None = field(default=None, metadata=FREE)
    """Warn if sampled and trained log-probabilities differ by more nats per token, on average over a step. Default:
    what the precision explains, from 0.001 to 0.1."""
    gap_error: Gap | None = field(default=None, metadata=FREE)
    """End the run if they differ by more. Default: ten times gap_warning."""

    @property
    def kind(self) -> "EngineKind":
        """What the engine of this name supports."""
        kind: EngineKind = registry.get("engine", self.name)()
        return kind

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gap_error is not None and self.gap_error < (self.gap_warning or 0.0):
            raise LmgymError(
                f"engine.gap_error is {self.gap_error}, below engine.gap_warning ({self.gap_warning}); make it larger"
            )
        for key in ("workers", "threads", "address", "seconds", "cache_gib"):
            if getattr(self, key) is not None and key not in self.kind.reads:
                readers = [name for name in registry.names("engine") if key in registry.get("engine", name).reads]
                raise LmgymError(
                    f"engine.{key} is for another engine; write engine.name: {' or '.join(readers)}, or remove it"
                )
        if self.ahead > self.kind.most_ahead:
            raise LmgymError(
                f"engine.ahead is {self.ahead}, and {self.name} holds one version of the weights; write ahead: "
                f"{self.kind.most_ahead}, or name: pool"
            )
        if self.chunk is not None and not self.kind.continues:
            raise LmgymError(
                f"engine.chunk: {self.name} does not go on with answers that other weights have begun; remove it, or "
                "write name: pool"
            )
        if self.chunk is not None and self.ahead < 2:
            raise LmgymError(
                f"engine.chunk is {self.chunk}, and engine.ahead is {self.ahead}: only answers that are sampled 2 "
                "steps ahead or more see newer weights on the way; write ahead: 2 or more, or remove chunk"
            )
        self.kind.check(self)


@dataclass(frozen=True)
class Place:
    """Where and how an engine is opened: the run's own choices (machine.json), its folder, and who trains with it.

    `canary` is the largest gap between sampled and scored log-probabilities that the recipe allows, in nats a token
    (None: what rounding explains); `corrected` says that all
    algorithms weigh answers that were sampled with other log-probabilities.

    Example: Place(Path("runs/a"), warn, unit=64, threads=1)"""

    folder: Path
    warn: Callable[[str], None]
    unit: int | None = None
    threads: int | None = None
    ranks: Ranks = ALONE
    canary: float | None = None
    corrected: bool = True


class EngineKind:
    """What an engine supports, which keys of `engine:` it reads, and how it is opened. What a subclass leaves out is
    that of an engine elsewhere.

    Example: EngineSection(name="pool").kind.shares_weights is False"""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Of workers, threads, address, seconds and cache_gib."""
    seeded: ClassVar[bool] = True
    """Random numbers are a function of the run's seed, so that a second run is the same."""
    shares_weights: ClassVar[bool] = False
    """It samples with the policy's own weights in the training process: packed ones too, and beside frozen models."""
    parts: ClassVar[bool] = True
    """Each rank may hold a part of the weights (`distributed.sharding`)."""
    most_ahead: ClassVar[int] = MOST_AHEAD
    """How many steps ahead it can sample: more than one needs several versions of the weights at once."""
    continues: ClassVar[bool] = True
    """It goes on with answers that other weights have begun (`Request.begun` and `pause`)."""
    any_kept_set: ClassVar[bool] = True
    """The sets that tokens were drawn from come back whatever their size (top_p, min_p)."""

    def check(self, section: EngineSection) -> None:
        """Raise LmgymError for keys that do not go together."""

    def check_pictures(self, section: EngineSection, architecture: str) -> None:
        """Raise LmgymError if it does not sample from a model of this `architecture` (model_type), which reads
        pictures."""
        raise LmgymError(
            f"engine.name: {section.name} does not read pictures, and a {architecture} does; write name: sampler"
        )

    def check_installed(self, section: EngineSection) -> None:
        """Raise LmgymError if a library is missing."""

    def usual_units(self, section: EngineSection, threads: int, steps: Iterable[tuple[int, int]]) -> Units:
        """The answers of a unit and the threads of a generator, where neither recipe nor run has chosen them: `threads`
        are the run's, `steps` the prompts and the group size of each stage."""
        return None, None

    def sentence(self, section: EngineSection, unit: int | None, threads: int | None) -> str:
        """Where and how a run samples its answers."""
        raise NotImplementedError(f"{type(self).__name__} has no sentence()")

    def open(self, section: EngineSection, policy: Policy, place: Place) -> Engine[Policy]:
        """The engine of a run. Raises LmgymError if it cannot be had."""
        raise NotImplementedError(f"{type(self).__name__} has no open()")


def unit_sentence(unit: int | None) -> str:
    """Example: unit_sentence(64) -> "units of 64 answers" """
    return "a whole rollout" if unit is None else f"units of {unit} answers"


def ahead_words(section: EngineSection) -> str:
    """Example: ahead_words(EngineSection(ahead=2, chunk=64)) -> ", 2 steps ahead, in chunks of 64 tokens" """
    if not section.ahead:
        return ""
    chunks = "" if section.chunk is None else f", in chunks of {section.chunk} tokens"
    return f", {'one step' if section.ahead == 1 else f'{section.ahead} steps'} ahead{chunks}"
