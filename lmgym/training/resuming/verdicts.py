"""What may change when a run is resumed: one table, `MAY_CHANGE`, and the differences that were found.

docs/run_folder.md explains it; a table in docs/reliability.md has what follows of each change."""

import json
from dataclasses import dataclass, field
from typing import Any

from lmgym.training.run import Progress

FREE, RECORDED, REFUSED = "free", "recorded", "refused"
MAY_CHANGE = {  # a key of a recipe, or a section: those of a stage without the stage's name; the longest match counts
    "threads": FREE,  # what comes of it is in "machine"
    "checkpoint": FREE,
    "logs": FREE,
    "distributed": FREE,
    "evaluation": FREE,
    "reward_timeout": FREE,
    "policy.device": FREE,  # as threads
    "policy.compute": FREE,  # as threads
    "steps": FREE,  # RECORDED with a learning rate that depends on it
    "early_stop": FREE,
    "env.seconds": FREE,
    "env.workers": FREE,
    "plugins": RECORDED,
    "callbacks": FREE,
    "engine": RECORDED,
    "engine.name": FREE,  # the units in "machine" make the bits
    "engine.unit": FREE,  # as threads
    "engine.threads": FREE,  # as threads
    "engine.workers": FREE,
    "engine.address": FREE,
    "engine.seconds": FREE,
    "engine.cache_gib": FREE,
    "engine.gap_at_load": FREE,
    "engine.gap_warning": FREE,
    "engine.gap_error": FREE,
    "policy.tokens_per_forward": RECORDED,
    "policy.activation_checkpointing": RECORDED,
    "policy.path": RECORDED,
    "policy.attention": RECORDED,
    "policy.products": RECORDED,
    "optimizer": RECORDED,
    "optimizer.name": REFUSED,
    "rewards": RECORDED,
    "sampling": RECORDED,
    "max_draws": RECORDED,
}


@dataclass
class Differences:
    """Sentences about what is not as it was, by what follows of it."""

    refused: list[str] = field(default_factory=list)
    """The checkpoint cannot be gone on from."""
    recorded: list[str] = field(default_factory=list)
    """The run goes on, but not bit for bit as if it had not been interrupted."""
    free: list[str] = field(default_factory=list)
    """Nothing that was computed would be another."""
    unknown: bool = False
    """The checkpoint has no fingerprint."""
    other_contents: bool = False
    """Code, or what a reward or an environment reads, has changed."""
    other_best: bool = False
    """The best evaluation so far was by another metric, or measured otherwise."""
    other_early: bool = False
    """So were those that early stopping has looked at."""

    def add(self, verdict: str, what: str, before: Any, now: Any) -> None:
        """Note a difference between two plain values."""
        sentence = f"{what} was {_short(before)} and is {_short(now)}"
        {REFUSED: self.refused, RECORDED: self.recorded, FREE: self.free}[verdict].append(sentence)


def verdict_of(key: str) -> str:
    """What a changed key leads to: what the table says of it, or of the section that it is in."""
    parts = key.split(".")
    known = (MAY_CHANGE.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next((verdict for verdict in known if verdict is not None), REFUSED)


def _short(value: Any) -> str:
    """A value as a sentence names it."""
    text = "not there" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = text[:12] if len(text) == 64 and not text.strip("0123456789abcdef") else text  # a checksum
    return text if len(text) <= 60 else text[:57] + "..."


def begun(progress: Progress, index: int) -> bool:
    """True if a stage has begun, or is over."""
    return index < progress.stage_index or (index == progress.stage_index and progress.begun)
