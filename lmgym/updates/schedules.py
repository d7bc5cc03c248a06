"""Learning rates over a stage, by the names that transformers gives them (its optimization.py): the share of the peak
rate after the warm-up."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lmgym.updates.optimizer import OptimizerSection

Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip


def share_of_peak(section: "OptimizerSection", step: int, steps: int, warmup: int) -> float:
    """The learning rate of a step behind the warm-up, as a share of its peak.

    progress = (step - warmup) / (steps - warmup) goes from 0 to 1; the falling schedules end at final_fraction:
    linear 1 - p; cosine (1 + cos(pi p)) / 2; with restarts the same of the fraction of cycles p; polynomial
    (1 - p)^power; inverse_sqrt 1 / sqrt(1 + (step - warmup) / w), w the warm-up or 10,000; warmup_stable_decay 1, then
    cosine over the last decay_fraction of the steps.

    Example: share_of_peak(OptimizerSection(schedule="cosine", final_fraction=0.1), 50, 100, 0) -> 0.55
    """
    since, left = step - warmup, max(steps - warmup, 1)
    progress = min(since / left, 1.0)
    decay = max(round(section.decay_fraction * steps), 1)
    shapes: dict[str, Callable[[], float]] = {
        "linear": lambda: 1 - progress,
        "cosine": lambda: _cosine(progress),
        "cosine_with_min_lr": lambda: _cosine(progress),
        "cosine_with_restarts": lambda: _cosine(section.cycles * progress % 1) if progress < 1 else 0.0,
        "polynomial": lambda: (1 - progress) ** section.power,
        "inverse_sqrt": lambda: 1 / math.sqrt(1 + since / (warmup or 10_000)),
        "warmup_stable_decay": lambda: _cosine(min(max(step - (steps - decay), 0) / decay, 1.0)),
    }
    if section.schedule not in shapes:
        return 1.0
    return section.final_fraction + (1 - section.final_fraction) * shapes[section.schedule]()


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
