"""Learning rates over a stage, by the names that transformers gives them (its optimization.py): the share of the peak
rate after the warm-up."""

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip


def depends_on_steps(schedule: str, warmup_ratio: float | None) -> bool:
    """True if a stage of more steps has another learning rate at the same step.

    Example: depends_on_steps("cosine", None) -> True; depends_on_steps("inverse_sqrt", None) -> False"""
    return warmup_ratio is not None or not schedule.startswith(("constant", "inverse"))


def share_of_peak(
    schedule: Schedule, step: int, steps: int, warmup: int, cycles: int, power: float, decay_fraction: float
) -> float:
    """The learning rate of a step behind the warm-up, from 1 at its end on: those named constant stay 1, inverse_sqrt
    falls without end, all others fall to 0.

    With p = (step - warmup) / (steps - warmup): linear 1 - p; cosine (1 + cos(pi p)) / 2; with restarts the same of the
    fraction of cycles p; polynomial (1 - p)^power; inverse_sqrt 1 / sqrt(1 + (step - warmup) / w), w the warm-up or
    10,000; warmup_stable_decay 1, then cosine over the last decay_fraction of the steps. transformers' polynomial ends
    at a rate of 1e-7, not at 0 (`optimizer.final_fraction`: its share of the peak).

    Example: share_of_peak("linear", 75, 100, 0, 1, 1.0, 0.1) -> 0.25"""
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    decay = max(round(decay_fraction * steps), 1)
    shapes: dict[str, Callable[[], float]] = {
        "linear": lambda: 1 - progress,
        "cosine": lambda: _cosine(progress),
        "cosine_with_min_lr": lambda: _cosine(progress),
        "cosine_with_restarts": lambda: _cosine(cycles * progress % 1) if progress < 1 else 0.0,
        "polynomial": lambda: (1 - progress) ** power,
        "inverse_sqrt": lambda: 1 / math.sqrt(1 + (step - warmup) / (warmup or 10_000)),
        "warmup_stable_decay": lambda: _cosine(min(max(step - (steps - decay), 0) / decay, 1.0)),
    }
    return shapes[schedule]() if schedule in shapes else 1.0


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
