"""Corpus metrics: one number for all answers of an evaluation, which is not the mean over the answers. Corpus BLEU and
the number of distinct words are such metrics.

A reward function has a corpus metric if it has an attribute `corpus`: a function of texts, examples and the reward's
arguments."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.processes.coroutines import result_of
from lmgym.rewards.base import Reward, episodes_to_judge, guard_reward
from lmgym.stats.intervals import Interval, SufficientStatistics, sums_interval
from lmgym.types import Episode


@dataclass(frozen=True)
class Corpus:
    """The value of a corpus metric over all answers to the prompts at these `places`, ascending, of the evaluation.

    If the metric is a function of sums over the prompts (such as BLEU), `summed` holds each prompt's part of the sums.
    Other metrics have None: the distinct words of all texts are no sum over the texts.

    Example: Corpus(0.31, range(500)).interval -> Interval(mean=0.31, low=nan, high=nan, count=500)"""

    value: float
    places: Sequence[int]
    summed: SufficientStatistics | None = None

    @property
    def prompts(self) -> int:
        """How many prompts it is about."""
        return len(self.places)

    @property
    def interval(self) -> Interval:
        """The value with its interval over prompts; without bounds (NaN) if there are no sums."""
        if self.summed is not None:
            return sums_interval(self.summed)
        return Interval(self.value, math.nan, math.nan, self.prompts)


def corpora(
    rewards: Sequence[Reward], groups: Sequence[Sequence[Episode]], timeout: float | None = 60.0
) -> dict[str, Corpus]:
    """Compute all corpus metrics of these rewards: "NAME/corpus" -> Corpus. `groups` are the episodes of each prompt;
    episodes without an answer, of a task that the reward is not for, or that it could not judge, are left out. Raises
    LmgymError as `base.call_reward` does."""
    figures = {}
    for reward in rewards:
        if hasattr(reward.function, "corpus"):
            usable = [
                [one for one in group if one.turns and one.reward_components.get(reward.name, 0.0) is not None]
                for group in groups
            ]
            judged = [episodes_to_judge(reward, group) for group in usable]
            if answered := {place: group for place, group in enumerate(judged) if group}:
                figures[f"{reward.name}/corpus"] = _corpus(reward, answered, timeout)
    return figures


def _corpus(reward: Reward, answered: Mapping[int, Sequence[Episode]], timeout: float | None) -> Corpus:
    groups = list(answered.values())
    episodes = [episode for group in groups for episode in group]
    call = [episode.text for episode in episodes], [episode.example for episode in episodes]
    arguments = getattr(reward.function, "keywords", {})
    function = reward.function.corpus  # type: ignore[attr-defined]
    sums, summed = getattr(function, "sums", None), None
    with guard_reward(reward, len(episodes), timeout):
        if sums is None:
            value = result_of(function(*call, **arguments))
        else:
            # Add up the rows of a prompt's answers: the prompt is the unit of the interval, not the single answer.
            by_text = sums(*call, **arguments)
            starts = np.cumsum([0, *map(len, groups[:-1])])
            summed = SufficientStatistics(np.add.reduceat(by_text.rows, starts, axis=0), by_text.value)
            value = summed.figure
    if not isinstance(value, numbers.Real):
        raise LmgymError(f"reward '{reward.name}': its corpus returned {value!r}; it must be a number")
    return Corpus(float(value), tuple(answered), summed)
