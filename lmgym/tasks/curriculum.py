"""`Curriculum`: prompts that the policy always or never solves are left out for a while."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.core.constraints import PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.tasks.stream import Stream
from lmgym.types import Episode, Example


@dataclass(kw_only=True)
class CurriculumSection(Section):
    """The `curriculum:` section of a stage.

    Example: CurriculumSection(reward="final_answer", solved=0.9)"""

    section = "curriculum"

    reward: str | None = None
    """Which reward says whether an answer is right; without it the whole score."""
    right: float = 1.0
    """An answer is right if that is at least this."""
    solved: Share = 1.0
    """A prompt rests if this share of its answers was right, or more: there is little to learn."""
    hopeless: Share = 0.0
    """A prompt rests if this share of its answers was right, or less: nothing says what is better."""
    rest: PositiveInt = 1
    """For how many epochs it is left out; then it is tried again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hopeless >= self.solved:
            raise LmgymError(
                f"curriculum.hopeless is {self.hopeless:g} and curriculum.solved is {self.solved:g}, so every prompt "
                "would rest; make hopeless smaller"
            )


class Curriculum:
    """The examples of each step, without those that rest; goes through a stream from where the last step ended.

    A prompt whose answers were all right, or all wrong (`CurriculumSection` says how many), is left out of the next
    `rest` epochs. If too few prompts are awake, epochs pass until there are enough. The order is a function of the
    stream and of this object's state, which checkpoints hold. Examples with the same id share what is known of them.

    Example:
        >>> curriculum = Curriculum(stream, CurriculumSection())
        >>> examples = curriculum.at(step=0); curriculum.observe(episodes); curriculum.advance()
    """

    def __init__(self, stream: Stream, section: CurriculumSection) -> None:
        self.stream, self.section = stream, section
        self.position = 0  # in the stream's sequence: where the next step begins
        self.resting: dict[str, int] = {}  # by id of the example: the first epoch that it is in again
        self._asked: dict[str, int] = {}  # by id, of the step in flight: the last epoch that it was asked in
        self._ends: dict[int, int] = {}  # of each draw of the step in flight: where the next one begins
        self._rates: dict[str, float] = {}

    def at(self, step: int, draw: int = 0) -> list[Example]:
        """The examples of this step. A further `draw`, asked for after the one before, goes on behind it. Until
        `advance` is called, the same draw has the same examples."""
        position, awake, passed = self._ends[draw - 1] if draw else self.position, list[Example](), 0
        while len(awake) < self.stream.prompts_per_step:
            example = self.stream.example(position)
            epoch = position // self.size
            position += 1
            if self.resting.get(example.id, 0) <= epoch:
                awake.append(example)
                self._asked[example.id] = max(epoch, self._asked.get(example.id, 0))
                continue
            passed += 1
            if passed % self.size == 0:  # perhaps all rest, for a million epochs: on to the first that has one awake
                first = min(self.resting.get(one.id, 0) for one in self.stream.examples)
                position = max(position, first * self.size)
        self._ends[draw] = position
        return awake

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Note the solve rates of all answers of a step. Raises LmgymError if there is no reward of the given name."""
        answers: dict[str, list[bool]] = {}
        for episode in episodes:
            if not episode.error and episode.judged and (right := self._is_right(episode)) is not None:
                answers.setdefault(episode.example.id, []).append(right)
        self._rates = {name: sum(right) / len(right) for name, right in answers.items()}

    def advance(self) -> None:
        """The step is done: what was noted of it counts from the next one on."""
        if self._ends:
            self.position = max(self._ends.values())
        last = (self.position - 1) // self.size
        for name, rate in self._rates.items():
            if self.section.hopeless < rate < self.section.solved:
                self.resting.pop(name, None)
            else:
                self.resting[name] = self._asked.get(name, last) + 1 + self.section.rest
        self._asked, self._ends, self._rates = {}, {}, {}

    def metrics(self) -> dict[str, float]:
        """The share of the examples that rest."""
        epoch = self.position // self.size
        return {"curriculum/resting": sum(until > epoch for until in self.resting.values()) / self.size}

    @property
    def size(self) -> int:
        """The positions of an epoch: as many as there are examples."""
        return len(self.stream.examples)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON: where the next step begins, and the epoch from which on each resting example is tried again."""
        return {"position": self.position, "resting": dict(self.resting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.position = int(state["position"])
        self.resting = {str(name): int(epoch) for name, epoch in state["resting"].items()}

    def _is_right(self, episode: Episode) -> bool | None:
        """None if the reward could not judge it."""
        name, components = self.section.reward, episode.reward_components
        if name is None:
            return episode.score >= self.section.right
        if name not in components:
            raise LmgymError(f"curriculum.reward: there is no reward '{name}'; the recipe has {', '.join(components)}")
        value = components.get(f"{name}/raw", components[name])  # raw: before `normalise`
        return None if value is None else value >= self.section.right
