"""What the doctor's rules know besides the numbers of metrics.jsonl: the recipe of a stage, and its tracked answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.types import Episode

GRAM, SHORTEST = 4, 24
"""Repeats are counted in runs of 4 tokens (arXiv 1908.04319, "seq-rep-4"), in answers of 24 tokens or more."""
LARGEST = 1e100
"""Numbers are cut to this size, so that their squares are numbers too: a reward may well be 1e308."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a stage's recipe. `learning_rate` is the highest of its schedule; `gap_limit` is
    in nats per token; `updates` are the optimizer steps planned for a batch where a `target_kl` may leave some out.

    Example: facts_of(read_yaml(Path("runs/a/recipe.yaml")), stage=0, compute="float32")"""

    stage: int = 0
    name: str = ""
    learning_rate: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)
    gap_limit: float | None = None
    updates: int | None = None
    replays: bool = False
    """Answers of older weights are trained on by design."""
    rewarded: bool = True
    """False where a teacher is learned from, and rewards are metrics only."""
    clips_tokens: bool = True
    """False where most tokens may lie outside of the bounds in a healthy run, or keep their gradient there."""


def facts_of(recipe: Record, stage: int, compute: str = "") -> Facts:
    """The facts of a stage of a resolved recipe, as the run folder's recipe.yaml has it. `compute` is the precision of
    the run ("float32"), which says how large rounding may make the sampler's gap. Raises LmgymError if the recipe has
    no such stage, or is not resolved."""
    try:
        return _facts(recipe, recipe["stages"][stage], stage, compute)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise LmgymError(
            f"recipe.yaml is not the resolved recipe of this run: stage number {stage} lacks something "
            f"({type(error).__name__}: {error}); put back what `lmgym train` has written"
        ) from error


def _facts(recipe: Record, section: Record, stage: int, compute: str) -> Facts:
    algorithm, rewards = section["algorithm"], section.get("rewards") or {}
    engine = recipe.get("engine", {})
    limit = engine.get("gap_warning")
    # Before GRPO was made of parts, its surrogate was two keys of the algorithm itself.
    former = {"name": algorithm.get("objective", "clip"), "ratio": algorithm.get("ratio", "token")}
    surrogate = {**former, **algorithm.get("surrogate", {})}
    # Replayed answers and those sampled ahead are of older weights, and nlpo's older form samples from another
    # set: their gap is no error.
    replays, compat = "replayed" in algorithm, algorithm.get("compat")
    other_cause = replays or compat == "rl4lms" or bool(engine.get("ahead"))
    usual = 1e-3 if compute == "float32" else 1e-1  # training/sampler_gap.py: LEAST, MOST
    return Facts(
        stage=stage,
        name=str(section.get("name", "")),
        learning_rate=float(section["optimizer"]["learning_rate"]),
        weights={n: float(v.get("weight", 1.0) if isinstance(v, Mapping) else v) for n, v in rewards.items()},
        gap_limit=None if other_cause else float(usual if limit is None else limit),
        updates=algorithm["epochs"] * algorithm["minibatches"] if algorithm.get("target_kl") else None,
        replays=replays,
        rewarded="teacher" not in algorithm,
        clips_tokens=surrogate["name"] == "clip" and surrogate["ratio"] == "token",
    )


@dataclass(frozen=True)
class Answer:
    """What the rules look at in one answer: the score (None: not judged), `cut` off by a limit, and how much of it
    repeats itself (NaN if it is too short). Example: answer_of_record(record) of rollouts.jsonl"""

    score: float | None
    components: Mapping[str, float]
    cut: bool
    repeated: float


def answer_of_record(record: Record) -> Answer:
    """An answer of rollouts.jsonl. Raises LmgymError for a record that is not as lmgym writes it."""
    try:
        turns = record["turns"]
        cut = any(turn["stop"] in ("length", "context") for turn in turns)
        ids = list(chain.from_iterable(turn["action_ids"] for turn in turns))
        return _answer(record["score"], record["reward_components"], cut, ids)
    except (LookupError, TypeError, AttributeError) as error:
        place = f"stage {record['stage'] + 1}, step {record['step'] + 1}"
        raise LmgymError(
            f"rollouts.jsonl: an answer of {place} is not as lmgym writes it ({type(error).__name__}: {error}); remove "
            "the line, or the file"
        ) from error


def answer_of_episode(episode: Episode) -> Answer:
    """The same of an episode that was just sampled."""
    ids = list(chain.from_iterable(turn.action_ids for turn in episode.turns))
    return _answer(episode.score if episode.judged else None, episode.reward_components, episode.truncated, ids)


def _answer(score: float | None, components: Mapping[str, float | None], cut: bool, ids: Sequence[int]) -> Answer:
    """Numbers that are not finite (null in a file) are left out: what they are of was not judged."""
    known = {name: value for name, own in components.items() if (value := bounded(own)) is not None}
    return Answer(bounded(score), known, cut, repeated_share(ids))


def repeated_share(ids: Sequence[int]) -> float:
    """1 - distinct / all of the runs of 4 tokens; NaN for fewer than 24 tokens. (arXiv 1908.04319, section 6)

    Example: of 29 runs of four tokens 2 are distinct
        >>> repeated_share([7, 8] * 16), repeated_share(range(32)), repeated_share([7, 8])
        (0.9310344827586207, 0.0, nan)
    """
    if len(ids) < SHORTEST:
        return math.nan
    grams = list(zip(*(ids[place:] for place in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams)


class Bounds(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float


def bounds_of(record: Record, name: str) -> Bounds | None:
    """A metric of an evaluation's record; None where it has no interval, which says how much may be chance.

    Example: bounds_of({"reward": 0.5, "reward/low": 0.4, "reward/high": 0.6}, "reward") -> Bounds(0.5, 0.4, 0.6)"""
    middle, low, high = (bounded(record.get(f"{name}{end}")) for end in ("", "/low", "/high"))
    return None if middle is None or low is None or high is None else Bounds(middle, low, high)


def bounded(value: Any) -> float | None:
    """A number as a float of at most 1e100 either way; None for anything else, NaN and infinity.

    Example:
        >>> bounded(3), bounded(10**400), bounded(float("nan")), bounded(None), bounded(True)
        (3.0, 1e+100, None, None, None)
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) == math.inf:
        return None
    return float(max(-LARGEST, min(value, LARGEST)))
