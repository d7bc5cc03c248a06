"""What a changed recipe would have made of a step: two retaken steps, laid side by side. And a retaken step beside the
record of the run, which it must equal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.experiments.what_if.recorded import as_written
from lmgym.experiments.what_if.retake import Retaken, Written
from lmgym.logs.traces.trace import TraceEpisode, read_episode, read_step, shards

CLOCKS = ("seconds", "tokens_per_second", "memory")  # metrics that no two runs have in common
SAME = {
    "index": "answers",
    "group": "answers",
    "example": "answers",
    "length": "answers",
    "score": "scores",
    "reward_components": "scores",
    "selected": "scores",
}  # columns of a step's table
TOLD_BY = {"length/mean": "answers", "reward": "scores"}  # without a table these numbers tell of them
CHUNK = 2**24


@dataclass(frozen=True)
class AnswerChange:
    """An answer's score and mean advantage, as they were and as they would be (0: it would not train).
    Example: AnswerChange(7, "arithmetic/3", "It is 12.", (1.0, 0.0), (0.5, -0.5)).flips -> True"""

    index: int
    example: str
    text: str
    score: tuple[float | None, float | None]
    advantage: tuple[float, float]

    @property
    def flips(self) -> bool:
        """True if it was pushed one way and would be pushed the other."""
        return self.advantage[0] * self.advantage[1] < 0


@dataclass(frozen=True)
class Direction:
    """How a vector lies to the real one: the cosine between them, and its length as a multiple of the real one's; NaN
    where one of them is 0. Example: Direction.between(real, other).cosine"""

    equal: bool
    cosine: float
    ratio: float

    @classmethod
    def between(cls, real: Tensor, other: Tensor) -> "Direction":
        sums = [0.0, 0.0, 0.0]
        for one, two in zip(real.split(CHUNK), other.split(CHUNK), strict=True):
            one, two = one.double(), two.double()
            for place, product in enumerate((one @ one, two @ two, one @ two)):
                sums[place] += float(product)
        lengths = math.sqrt(sums[0]), math.sqrt(sums[1])
        cosine = sums[2] / (lengths[0] * lengths[1]) if all(lengths) else math.nan
        ratio = lengths[1] / lengths[0] if lengths[0] else math.nan
        return cls(torch.equal(real, other), cosine, ratio)


@dataclass(frozen=True)
class StepDifference:
    """Pairs are (as it was, as it would be). `effective` is the effective sample size of the next step's answers after
    the changed step, and their number; None where there is no next step, or nothing is sampled."""

    answers: list[AnswerChange]
    groups: tuple[int, int]
    """Groups in which some answer has an advantage."""
    group_count: int
    tokens: tuple[int, int]
    """Tokens that the loss pushes."""
    losses: dict[str, tuple[float | None, float | None]]
    gradient: Direction | None
    moved: Direction
    effective: tuple[float, int] | None


def compare_steps(real: Retaken, changed: Retaken) -> StepDifference:
    """Two retaken steps of the same answers. Example: compare_steps(real, real).moved.cosine -> 1.0"""
    answers = []
    for index, one in ((index, one) for index, one in real.answers.items() if index in changed.answers):
        other, text = changed.answers[index], one.turns[-1].text if one.turns else ""
        advantages = mean_advantage(one), mean_advantage(other)
        answers.append(AnswerChange(index, str(one.example["id"]), text, (one.score, other.score), advantages))
    names = sorted(name for name in {*real.record, *changed.record} if name.startswith("loss/"))
    both = real.gradient is not None and changed.gradient is not None
    return StepDifference(
        answers=answers,
        groups=(len(groups_with_signal(real.answers)), len(groups_with_signal(changed.answers))),
        group_count=len({one.group for one in real.answers.values()}),
        tokens=(pushed_tokens(real.answers), pushed_tokens(changed.answers)),
        losses={name: (real.record.get(name), changed.record.get(name)) for name in names},
        gradient=Direction.between(real.gradient, changed.gradient) if both else None,  # type: ignore[arg-type]
        moved=Direction.between(real.moved, changed.moved),
        effective=_effective(real, changed),
    )


def mean_advantage(answer: TraceEpisode) -> float:
    """The mean over an answer's tokens; 0 if it is not in the batch, or has none."""
    columns = [row.columns["advantages"] for row in answer.rows if "advantages" in row.columns]
    return float(np.concatenate(columns).astype(np.float64).mean()) if columns else 0.0


def groups_with_signal(answers: Mapping[int, TraceEpisode]) -> set[int]:
    """The numbers of the groups in which some token has an advantage."""
    return {
        one.group
        for one in answers.values()
        if any(np.any(row.columns["advantages"]) for row in one.rows if "advantages" in row.columns)
    }


def pushed_tokens(answers: Mapping[int, TraceEpisode]) -> int:
    """How many tokens some term of the loss pushes."""
    count = 0
    for row in (row for one in answers.values() for row in one.rows):
        columns = [column != 0 for name, column in row.columns.items() if name.startswith("push/")]
        count += int(np.any(columns, axis=0).sum()) if columns else 0
    return count


def effective_sample_size(log_weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 of importance weights w, given their natural logarithms [E]: how many answers of the right
    policy are worth as much as these E (Kong 1992; Owen, Monte Carlo theory, chapter 9.3).

    Example:
        >>> effective_sample_size(torch.zeros(4)), round(effective_sample_size(torch.tensor([0.0, -50.0])), 3)
        (4.0, 1.0)
    """
    weights = (log_weights.double() - log_weights.max()).exp()
    return float(weights.sum() ** 2 / (weights**2).sum())


def answer_sums(batch: Batch, column: Tensor) -> Tensor:
    """The sum of a column over the actions of each episode of a batch, in fp64."""
    _, place = torch.unique(batch.episode, return_inverse=True)
    per_row = (column.to("cpu").double() * batch.actions.cpu()).sum(1)
    return torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place.cpu(), per_row)


def _effective(real: Retaken, changed: Retaken) -> tuple[float, int] | None:
    if real.following is None or real.following_logprobs is None or changed.following_logprobs is None:
        return None
    weights = answer_sums(real.following, changed.following_logprobs - real.following_logprobs)
    return effective_sample_size(weights), len(weights)


def unlike_record(folder: Path, stage: int, record: Mapping[str, Any], real: Written) -> tuple[list[str], int]:
    """What differs between a retaken step and the record of the run, by name, and how many numbers and answers were
    compared. What does not follow from the bits comes first: other "answers", and other "scores" or another selection
    of them."""
    step, names, compared = real.record["step"], list[str](), 0
    unlike = unlike_numbers(record, real.record)
    if (stage, step) in shards(folder):
        with as_written(folder, step):
            table = read_step(folder, stage, step).episodes
            names += [what for name, what in SAME.items() if table[name] != real.step.episodes[name]]
            for index in (index for index, kept in zip(table["index"], table["kept"], strict=True) if kept):
                own = _bytes(read_episode(folder, stage, step, index))
                other = _bytes(real.answers[index]) if index in real.answers else {}
                compared += len(own)
                columns = {name.split(" ")[0] for name, value in own.items() if other.get(name) != value}
                names += ["answers" if name in ("tokens", "actions") else name for name in sorted(columns)]
    else:
        names += [TOLD_BY[name] for name in unlike if name in TOLD_BY]
    names += unlike
    first = [name for name in ("answers", "scores") if name in names]
    return list(dict.fromkeys([*first, *names])), compared + len(_shared(record, real.record))


def unlike_numbers(record: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The names of the numbers that a step's record in metrics.jsonl has otherwise when the step is taken again.

    Example: unlike_numbers({"reward": 0.5, "seconds": 1.0}, {"reward": 0.25, "seconds": 2.0}) -> ["reward"]"""
    return [name for name in _shared(record, own) if record[name] != own[name]]


def cautions(unlike: Sequence[str], reason: str) -> Iterator[str]:
    """A sentence for a step that is not sure to be the run's own: its numbers are others, or there is a `reason`
    (`reason_unlike`) for the weights behind it to be others, such as a gradient that is clipped elsewhere.

    Example: list(cautions([], "")) -> []"""
    if unlike:
        yield (
            f"as it was, the step gives other bits than the run has recorded{reason}: {', '.join(unlike[:5])}; the "
            "answers are the same, so read what follows with that in mind"
        )
    elif reason:
        yield f"the step is taken with what has changed{reason}, which its own numbers need not show"


def check_same_answers(folder: Path, step: int, unlike: Sequence[str], reason: str) -> None:
    """Raise LmgymError if the answers of a step that was taken again are not those of the run, or not scored so."""
    if other := next((name for name in ("answers", "scores") if name in unlike), None):
        raise LmgymError(
            f"{folder}: taken again, step {step + 1} has other {other} than the run recorded{reason}, so nothing can "
            "be said about it; a run with logs.traces: all keeps its answers themselves, with their scores"
        )


def _shared(record: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [name for name in record if name in own and name.split("/")[0] not in CLOCKS]


def _bytes(answer: TraceEpisode) -> dict[str, bytes]:
    """Every array of an answer, as bytes."""
    found = dict[str, bytes]()
    for number, row in enumerate(answer.rows):
        arrays = {"tokens": row.tokens, "actions": row.actions, **row.columns}
        found |= {f"{name} {number}": array.tobytes() for name, array in arrays.items()}
    return found
