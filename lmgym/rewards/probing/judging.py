"""Given answers are judged as sampled ones are: as episodes, by the call that training makes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import Reward
from lmgym.rewards.groups import compares
from lmgym.rewards.payment import pay_reward
from lmgym.text.chat import messages_of
from lmgym.types import Episode, Example, Turn


@dataclass(frozen=True)
class Said:
    """What a reward says of an answer: its value before the weight; None, with an error or without, if it cannot judge
    it. Example: Said(None, "reward 'judge' raised ValueError: empty")"""

    value: float | None
    error: str = ""


@dataclass(frozen=True)
class Panel:
    """Answers to one prompt that are judged together: a reward of groups compares them.

    Example: Panel(example, ("#### 18", "#### 19"))"""

    example: Example
    texts: tuple[str, ...]


@dataclass
class Judging:
    """Asks one reward. `timeout` is in seconds, for one call; `tokenizer` is that of the recipe's model, for rewards
    that read tokens.

    Example: Judging(reward).ask([Panel(example, ("4", "5"))]) -> [[Said(1.0), Said(0.0)]]"""

    reward: Reward
    timeout: float = 60.0
    tokenizer: Any = None
    answers: int = field(default=0, init=False)  # judged so far
    seconds: float = field(default=0.0, init=False)

    @property
    def in_groups(self) -> bool:
        """Whether the reward compares the answers of a panel; else each is judged by itself."""
        return compares(self.reward)

    def ask(self, panels: Sequence[Panel]) -> list[list[Said]]:
        """What the reward says of each text of each panel, in one call. Raises LmgymError where that would end a
        run."""
        rows = list[list[Episode]]()
        for panel in panels:
            numbers = [len(rows)] * len(panel.texts)
            if not self.in_groups:
                first = sum(map(len, rows))
                numbers = [first + place for place in range(len(panel.texts))]
            rows.append(
                [self._episode(panel.example, text, group) for group, text in zip(numbers, panel.texts, strict=True)]
            )
        episodes = [one for row in rows for one in row]
        for index, episode in enumerate(episodes):
            episode.index = index
        began = time.perf_counter()
        if episodes:
            pay_reward(self.reward, episodes, self.timeout, self.tokenizer, len(episodes))
        self.seconds += time.perf_counter() - began
        self.answers += len(episodes)
        name = self.reward.name
        return [[Said(one.reward_components[name], one.reward_errors.get(name, "")) for one in row] for row in rows]

    def try_to_ask(self, panels: Sequence[Panel]) -> list[list[Said]]:
        """As `ask`, but what would end a run is an error of each answer."""
        try:
            return self.ask(panels)
        except LmgymError as error:
            refused = Said(None, f"it would end the run: {error}")
            return [[refused for _ in panel.texts] for panel in panels]

    def _encode(self, text: str) -> list[int]:
        """The ids of a text, which may be longer than the model reads: no reward has to run it."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _episode(self, example: Example, text: str, group: int) -> Episode:
        ids = [] if self.tokenizer is None else self._encode(text)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        messages = [*messages_of(example.prompt), {"role": "assistant", "content": text}]
        chat = not isinstance(example.prompt, str)
        return Episode(example, group, 0, [Turn([], ids, text=text)], messages=messages, chat=chat)
