"""The metrics of two evaluations of the same prompts, or of several runs, that can be set side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lmgym.rewards.base import Reward
from lmgym.rewards.corpus import Corpus
from lmgym.rollouts.evaluate import chosen_by, counted_with, is_share, measured
from lmgym.stats.intervals import SufficientStatistics, share_interval
from lmgym.stats.paired import Paired, compare_paired, compare_summed, untested
from lmgym.types import Episode

Numbers = Mapping[str, Sequence[Sequence[float]]]  # of each metric, a list of numbers for each prompt
Value = TypeVar("Value")


def numbers_of(
    groups: Sequence[Sequence[Episode]], rewards: Sequence[Reward], best_of: str | None
) -> dict[str, list[list[float]]]:
    """What `measured` gives, and `chosen_by` where a recipe has `evaluation.best_of`: a list for each prompt."""
    return measured(groups, rewards) | (chosen_by(best_of, groups, rewards) if best_of is not None else {})


def completed(evaluations: Sequence[Mapping[str, Value]], nothing: Callable[[Value], Value]) -> list[dict[str, Value]]:
    """The metrics of several evaluations; one that an evaluation lacks since it is 0 there, such as
    "environment_errors", becomes `nothing` of the metric that it is counted with.

    Example:
        >>> completed([{"reward": 0.5}, {"reward": 0.4, "unjudged": 0.1}], lambda reward: 0.0)
        [{'reward': 0.5, 'unjudged': 0.0}, {'reward': 0.4, 'unjudged': 0.1}]
    """
    rare = {name: other for one in evaluations for name in one if (other := counted_with(name)) is not None}
    return [
        {**one, **{name: nothing(one[other]) for name, other in rare.items() if name not in one and other in one}}
        for one in evaluations
    ]


def zeros(numbers: Sequence[Sequence[float]]) -> list[list[float]]:
    """A 0 in place of each number.

    Example:
        >>> zeros([[0.5, 1.0], []])
        [[0.0, 0.0], []]
    """
    return [[0.0] * len(own) for own in numbers]


def zero_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a metric that was 0 for all prompts of this one.

    Example:
        >>> zero_result({"mean": 0.5, "low": 0.3, "high": 0.7, "count": 25, "share": False})["mean"]
        0.0
    """
    return asdict(share_interval([0.0] * result["count"]))


def pair_metrics(
    first: Numbers, second: Numbers, corpora: Sequence[Mapping[str, Corpus]] = ({}, {})
) -> tuple[dict[str, Paired], list[str]]:
    """The metrics of both sides, paired by the prompts that were judged for both; one of the whole corpus, if it is a
    sum, behind that of single answers. And a sentence for each metric that cannot be paired.

    Example:
        >>> pair_metrics({"reward": [[1.0], [0.0]]}, {"reward": [[1.0], [1.0]], "words": [[3.0], [4.0]]})[1]
        ['words is not compared: only B has it']
    """
    metrics, notes = dict[str, Paired](), list[str]()
    both = [name for name in first if name in second]
    for name in both:
        pairs = [pair for pair in zip(first[name], second[name], strict=True) if all(pair)]
        if not pairs:
            notes.append(f"{name} is not compared: it has no prompt that was judged for both")
            continue
        one, other = zip(*pairs, strict=True)
        metrics[name] = compare_paired(one, other, shares=is_share(name, both))
        whole = f"{name}/corpus"
        if all(whole in own for own in corpora):
            metrics[whole] = of_all(corpora[0][whole], corpora[1][whole])
    for letter, own in (("A", first), ("B", second)):
        notes += [
            f"{name} is not compared: only {letter} has it" for name in own if name not in both and any(own[name])
        ]
    return metrics, notes


def of_all(first: Corpus, second: Corpus) -> Paired:
    """The difference of a corpus metric; tested only if both are computed from sums, and then over the prompts that
    were judged for both."""
    common = np.intersect1d(first.places, second.places)
    if first.summed is None or second.summed is None or not len(common):
        return untested(first.interval, second.interval)
    return compare_summed(
        _of_prompts(first.summed, first.places, common), _of_prompts(second.summed, second.places, common)
    )


def _of_prompts(summed: SufficientStatistics, places: Sequence[int], common: npt.NDArray[Any]) -> SufficientStatistics:
    return replace(summed, rows=summed.rows[np.isin(places, common)])
