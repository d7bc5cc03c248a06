"""Scoring finished answers while others are still being sampled, for rewards with the option `parallel`."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from lmgym.rewards.base import Reward, episodes_to_judge
from lmgym.types import Episode


def background_scoring(rewards: Sequence[Reward]) -> Callable[[Episode], None] | None:
    """A function to call with each episode as soon as its text is final: it begins the scoring. None if no reward can
    begin early. The values are used when the rewards are computed, and are the same as without it.

    Example: collect(prompts, actor, sampling, path, envs, ended=scoring_beside(rewards))
    """
    able = [one for one in rewards if hasattr(one.function, "begin") and not (one.by_token or one.each_turn)]
    if not able:
        return None

    def begin(episode: Episode) -> None:
        for reward in able:
            # An error here comes again when the rewards are computed, and is reported then.
            with suppress(Exception):
                for one in episodes_to_judge(reward, [episode]):
                    reward.function.begin(one.text, one.example)  # type: ignore[attr-defined]

    return begin
