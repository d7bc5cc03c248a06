"""GRPO with a buffer: each step also trains on groups of earlier steps, weighted by the ratio to who sampled them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lmgym.algorithms.base import Terms, UpdateContext
from lmgym.algorithms.grpo import GRPO
from lmgym.algorithms.replay_buffer import Group, ReplayBuffer, check_files, read_buffer
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import PositiveFloat, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.losses import log_ratio, policy_gradient


@register("algorithm", "replay")
@dataclass(kw_only=True)
class Replay(GRPO):
    """GRPO's loss with r_t = pi(y_t) / (the probability with which y_t was sampled), on fresh and on replayed groups.

    A group is kept from the step after its own until it is `max_age` updates old or newer ones push it out. Each step
    draws `replayed` of them, uniformly and none twice. Groups of equal scores teach nothing and are not kept.

    Example: as many old groups as new ones, none older than four updates:
        >>> Replay(group_size=8, replayed=32, capacity=128, max_age=4)      # with prompts_per_step: 32
    """

    capacity: PositiveInt = 64
    """Most groups kept; the oldest go first."""
    replayed: PositiveInt = 8
    """Groups replayed in a step (fewer while fewer are kept)."""
    max_age: PositiveInt = 8
    """Updates since a group was sampled after which it is dropped."""
    truncate: PositiveFloat | None = None
    """In place of the clip: the policy gradient of each token times min(r_t, this) (truncated importance weights)."""
    load_buffer: str | None = None
    """A file of groups to begin with, which `save_buffer` has written. They count as one update old."""
    save_buffer: str | None = None
    """A file that holds the buffer after each step."""
    buffer: ReplayBuffer = field(default_factory=ReplayBuffer, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replayed > self.capacity:
            raise LmgymError(
                f"algorithm.replayed is {self.replayed}, and the buffer holds capacity ({self.capacity}) groups; raise "
                "capacity, or lower replayed"
            )
        check_files(self.load_buffer, self.save_buffer)
        if self.truncate is not None and (self.objective != "clip" or self.ratio != "token"):
            raise LmgymError("algorithm.truncate takes the place of the objective; leave objective: clip, ratio: token")
        for key in ("importance_cap", "importance_floor", "mismatch_bound"):
            if getattr(self, key) is not None:
                raise LmgymError(f"algorithm.{key}: replay's ratio is to the sampler already; leave it out")
        if self.truncate is not None and self.off_policy_threshold is not None:
            raise LmgymError("algorithm.truncate takes the place of off_policy_threshold too; leave one of them out")

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

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        terms, metrics = super().loss(batch.replace(logprobs_old=batch.logprobs_sampler), new)
        if self.truncate is None:
            return terms, metrics
        ratio = log_ratio(new.logprobs.detach(), batch.require("logprobs_sampler")).exp()
        weighted = policy_gradient(new.logprobs, ratio.clamp(max=self.truncate) * batch.require("advantages"))
        cut = (ratio > self.truncate).to(ratio.dtype)
        return {**terms, "policy": (weighted, self.reduction)}, {**metrics, "ratio/clipped": cut}

    def _denominator(self, batch: Batch) -> Tensor:
        return batch.require("logprobs_sampler")

    def after_update(self, context: UpdateContext) -> None:
        """Keep the groups of this step for those to come."""
        mixed = [group for group in self.buffer.fresh if len({episode.score for episode in group}) > 1]
        self.buffer.end_step([*self.buffer.groups, *mixed][-self.capacity :], context, self.save_buffer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer.load_state_dict(state)
