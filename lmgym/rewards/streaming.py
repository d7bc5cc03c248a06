"""Scores finished answers while others are still being sampled, for rewards with the option `parallel`."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from lmgym.rewards.base import Reward, episodes_to_judge
from lmgym.types import Episode


def background_scoring(rewards: Sequence[Reward]) -> Callable[[Episode], None] | None:
    """A callback that starts to score an episode; call it as soon as the episode's text is final. None if no reward can
    start early. `call_reward` later picks the values up; they are the same as without the callback."""
    # Rewards by token or by turn score prefixes of the answer, not the answer alone.
    early = [r for r in rewards if hasattr(r.function, "begin") and not (r.by_token or r.each_turn)]
    if not early:
        return None

    def begin(episode: Episode) -> None:
        for reward in early:
            # An error is raised again when the rewards are computed, and is reported there.
            with suppress(Exception):
                for shown in episodes_to_judge(reward, [episode]):
                    reward.function.begin(shown.text, shown.example)  # type: ignore[attr-defined]

    return begin
