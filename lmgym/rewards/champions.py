"""Moving champions: the best answer to each prompt so far, which the next answers to it are compared with.

A reward of groups that compares with one has a function `keeps_champion`, which takes the reward's arguments and says
whether these ask for it. It finds the champion of a prompt in the example's `meta["champion"]`, and gives an answer
more than 0.5 if it is better. Champions are fixed while a draw of a step is judged, and change between draws, on all
ranks alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward, episodes_to_judge
from lmgym.rewards.views import CHAMPION
from lmgym.types import Episode, Example

MOST = 10_000  # prompts with a champion; who has been champion for longest gives way, and that prompt begins anew


@dataclass
class Champions:
    """The champions of one reward, by the id of the example, those that have been champions for longest first.

    Example: Champions().crown([("a/0", "a better answer", 0.75)]) seats it; with 0.5 the old one stays"""

    seats: dict[str, str] = field(default_factory=dict)

    def of(self, examples: Sequence[Example]) -> dict[str, str]:
        """The champions of these examples, for those that have one."""
        return {one.id: self.seats[one.id] for one in examples if one.id in self.seats}

    def crown(self, judged: Sequence[tuple[str, str, float]]) -> None:
        """Seat the best answer to each prompt, of (id of the example, text, value), if it has earned more than 0.5. Of
        equally good ones the first; a tie keeps the old champion."""
        best: dict[str, tuple[str, float]] = {}
        for prompt, text, value in judged:
            if value > best.get(prompt, ("", 0.5))[1]:
                best[prompt] = text, value
        for prompt, (text, _) in best.items():
            self.seats.pop(prompt, None)  # to the end
            self.seats[prompt] = text
        for prompt in [*self.seats][: max(len(self.seats) - MOST, 0)]:
            del self.seats[prompt]


def keeps_champion(reward: Reward) -> bool:
    """Whether the reward, with its arguments, compares with a moving champion."""
    asks = getattr(reward.function, "keeps_champion", None)
    return asks is not None and bool(asks(**getattr(reward.function, "keywords", {})))


def check_champions(rewards: Sequence[Reward], ahead: int) -> None:
    """Raise LmgymError for a moving champion where answers are sampled and judged `ahead`: they would be compared with
    one that has been beaten meanwhile, and could take over from a better one."""
    for reward in rewards:
        if ahead and keeps_champion(reward):
            raise LmgymError(
                f"reward '{reward.name}' compares with a champion that moves from step to step, and engine.ahead "
                "judges answers before the steps that they are for; write engine.ahead: 0, or against: reference"
            )


def with_champions(
    rewards: Sequence[Reward], champions: Mapping[str, Champions], examples: Sequence[Example]
) -> list[Reward]:
    """The rewards as they judge answers to these examples: with the champions as they are now."""
    return [
        replace(reward, champions=champions[reward.name].of(examples)) if reward.name in champions else reward
        for reward in rewards
    ]


def crown(episodes: Sequence[Episode], rewards: Sequence[Reward], champions: Mapping[str, Champions]) -> None:
    """Let the best of these answers take over, by what the rewards have said of them (before `normalise`). The text of
    a champion is what the reward was shown."""
    for reward in (reward for reward in rewards if reward.name in champions):
        found = [(one, one.reward_components.get(reward.name)) for one in episodes if reward.applies(one.example)]
        judged = [(one, value) for one, value in found if value is not None and one.turns and not one.error]
        shown = episodes_to_judge(reward, [one for one, _ in judged])
        triples = [(one.example.id, one.text, value) for one, (_, value) in zip(shown, judged, strict=True)]
        champions[reward.name].crown(triples)


def restore(champions: Mapping[str, Champions], state: Mapping[str, Any]) -> None:
    """Take over what a checkpoint holds of these rewards' champions. Raises ValueError where it is of another form."""
    for name, seats in state.items():
        texts = [*seats, *seats.values()] if isinstance(seats, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"'{name}' has something else")
        if name in champions:
            champions[name].seats = dict(seats)


def champion_of(example: Example) -> str | None:
    """Whom answers to this example are compared with: the best so far; before there is one, the text in the column
    `champion` of the data, or the first reference; None without any. Raises LmgymError for a column that holds no
    text."""
    known: Any = example.meta.get(CHAMPION)
    if known is None:
        return example.references[0] if example.references else None
    if not isinstance(known, str):
        raise LmgymError(f"column '{CHAMPION}' of example '{example.id}' holds no text, and a champion is an answer")
    return known
