"""What may change when a run is resumed (the fields of a recipe's sections say it, in their metadata), and the
differences that were found.

docs/run_folder.md explains it; a table in docs/resuming.md has what follows of each change."""

import json
from dataclasses import dataclass, field, fields
from typing import Any

from lmgym.config.build import section_of
from lmgym.config.schema import STAGE_KEYS, Config, Stage
from lmgym.core.validation import field_hints
from lmgym.training.run import Progress

FREE, RECORDED, REFUSED = "free", "recorded", "refused"


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
    """What a changed key leads to (those of a stage have no stage's name): what its field says, or else that of the
    section that it is in. Example: verdict_of("optimizer.learning_rate") -> "recorded" """
    parts, verdict = key.split("."), REFUSED
    section: Any = Stage if parts[0] in STAGE_KEYS else Config
    for part, rest in zip(parts, [*parts[1:], ""], strict=True):
        own = {one.name: one for one in fields(section)}.get(part) if section is not None else None
        if own is None:
            return verdict
        known = own.metadata.get("keys", {}).get(rest, own.metadata)
        verdict = known.get("resumed", verdict)
        section = section_of(field_hints(section).get(part))
    return verdict


def _short(value: Any) -> str:
    """A value as a sentence names it."""
    text = "not there" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = text[:12] if len(text) == 64 and not text.strip("0123456789abcdef") else text  # a checksum
    return text if len(text) <= 60 else text[:57] + "..."


def begun(progress: Progress, index: int) -> bool:
    """True if a stage has begun, or is over."""
    return index < progress.stage_index or (index == progress.stage_index and progress.begun)
