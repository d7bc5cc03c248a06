"""GRPO with a buffer: each step also trains on groups of earlier steps, weighted by the ratio to who sampled them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmgym.algorithms.base import UpdateContext
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.correction import Correction, SamplerRatio
from lmgym.algorithms.replay_buffer import Group, ReplayBuffer, check_replay, read_buffer
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register


@register("algorithm", "replay")
@dataclass(kw_only=True)
class Replay(GRPO):
    """GRPO's loss with r_t = pi(y_t) / (the probability with which y_t was sampled), on fresh and on replayed groups.

    A group is kept from the step after its own until it is `max_age` updates old or newer ones push it out. Each step
    draws `replayed` of them, uniformly and none twice. Groups of equal scores teach nothing and are not kept.

    Example: as many old groups as new ones, none older than four updates:
        >>> Replay(group_size=8, replayed=32, capacity=128, max_age=4)      # with prompts_per_step: 32
    """

    correction: Correction = SamplerRatio()  # noqa: RUF009 (frozen)
    """The ratio is always to who sampled an answer."""
    capacity: PositiveInt = 64
    """Most groups kept; the oldest go first."""
    replayed: PositiveInt = 8
    """Groups replayed in a step (fewer while fewer are kept)."""
    max_age: PositiveInt = 8
    """Updates since a group was sampled after which it is dropped."""
    load_buffer: str | None = None
    """A file of groups to begin with, which `save_buffer` has written. They count as one update old."""
    save_buffer: str | None = None
    """A file that holds the buffer after each step."""
    buffer: ReplayBuffer = field(default_factory=ReplayBuffer, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_replay(self.replayed, self.capacity, "groups", self.load_buffer, self.save_buffer)
        if self.requirements.reward is not True:
            raise LmgymError(
                "algorithm.credit pays for what is known only when answers are scored, and replay keeps groups by "
                "their rewards; take another credit, or grpo without replay"
            )
        if not self.correction.ratio_to_sampler or self.correction.mismatch_bound is not None:
            raise LmgymError(
                "algorithm.correction: replay's ratio is to the sampler already; leave it out, or set its "
                "off_policy_threshold alone"
            )

    @classmethod
    def in_present_keys(cls, name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The former `ratio_to` said nothing here: the ratio was to the sampler in any case."""
        told = {**given, "ratio_to": "sampler"} if "ratio_to" in given else given
        return super().in_present_keys(name, told, where)

    @property
    def weighs_old(self) -> bool:
        return False  # a buffer beside answers that are sampled ahead was never tried

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        if self.load_buffer:
            read_buffer(self.load_buffer, size)

    def select(self, groups: list[Group], wanted: int) -> tuple[list[Group], bool]:
        """The fresh groups, then copies of the replayed ones (the trainer renumbers what it is given)."""
        fresh, more = super().select(groups, wanted)
        old = self.buffer.begin_step(fresh, self.max_age, self.load_buffer)
        chosen = self.buffer.draw(len(old), self.replayed)
        return [*fresh, *([replace(episode) for episode in old[index]] for index in chosen)], more

    def after_update(self, context: UpdateContext) -> None:
        """Keep the groups of this step for those to come."""
        mixed = [group for group in self.buffer.fresh if len({episode.score for episode in group}) > 1]
        self.buffer.end_step([*self.buffer.groups, *mixed][-self.capacity :], context, self.save_buffer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer.load_state_dict(state)
