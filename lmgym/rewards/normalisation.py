"""The reward option `normalise`: values relative to a running estimate of their mean and deviation."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from lmgym.rewards.base import Reward
from lmgym.types import Episode

SMALLEST = 1e-8  # added to the deviation
ROUNDING = 1e-12  # a deviation of no more than this part of the mean is one of rounding: all values are equal


@dataclass
class Moments:
    """Mean and sum of squared deviations of all values so far (Chan, Golub and LeVeque 1983).

    Example: after 1, 2 and 3: Moments(count=3, mean=2.0, squares=2.0), whose deviation is 1"""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Take in more values."""
        if not values:
            return
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, apart = self.count + len(values), mean - self.mean
        self.squares += squares + apart**2 * self.count * len(values) / total
        self.mean += apart * len(values) / total
        self.count = total

    @property
    def deviation(self) -> float:
        """The standard deviation (n - 1); 1 of fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0


def normalise(
    episodes: Sequence[Episode], rewards: Sequence[Reward], moments: MutableMapping[str, Moments], learn: bool = True
) -> None:
    """Replace what rewards with `normalise` have paid by (value - mean) / deviation; with `scale`, by value /
    deviation. The estimates take in these episodes first (`learn`). The raw value stays as the component NAME/raw.
    While all values so far are equal, the deviation counts as 1, so that `scale` leaves them as they are.

    Source: TRL 0.11, PPOTrainer with use_score_scaling and use_score_norm; it divides equal values by 1e-8.

    Example:
        >>> normalise(episodes, rewards, stage.moments)
    """
    for reward in (reward for reward in rewards if reward.normalise):
        shown = [
            (episode, raw)
            for episode in episodes
            if episode.turns and not episode.error and reward.applies(episode.example)
            if (raw := episode.reward_components[reward.name]) is not None
        ]
        known = moments.setdefault(reward.name, Moments())
        if learn:
            known.add([raw for _, raw in shown])
        centre = 0.0 if reward.normalise == "scale" else known.mean
        equal = known.deviation <= ROUNDING * abs(known.mean)
        deviation = 1.0 if equal else known.deviation + SMALLEST
        for episode, raw in shown:
            value = (raw - centre) / deviation
            episode.reward_components |= {reward.name: value, f"{reward.name}/raw": raw}
            episode.turns[-1].reward += reward.weight * (value - raw)
            episode.score = sum(turn.reward for turn in episode.turns)
