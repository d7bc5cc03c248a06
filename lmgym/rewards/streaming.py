"""Scoring answers that have ended while others are still being sampled, for rewards that work in processes of their own
(the option `parallel`)."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from lmgym.rewards.base import Reward, judged
from lmgym.types import Episode


def scoring_beside(rewards: Sequence[Reward]) -> Callable[[Episode], None] | None:
    """What is to be told of each episode as soon as its text is final, so that its scoring begins; None where no reward
    can begin early. What it comes to is used when the rewards are asked, and changes no number.

    Example: collect(prompts, actor, sampling, path, envs, ended=scoring_beside(rewards))
    """
    able = [one for one in rewards if hasattr(one.function, "begin") and not (one.by_token or one.each_turn)]
    if not able:
        return None

    def begin(episode: Episode) -> None:
        for reward in able:
            # Whatever is wrong here is wrong when the rewards are asked, and is said then.
            with suppress(Exception):
                for one in judged(reward, [episode]):
                    reward.function.begin(one.text, one.example)  # type: ignore[attr-defined]

    return begin
