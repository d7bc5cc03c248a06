"""GRPO with a buffer: each step also trains on groups of earlier steps, weighted by the ratio to who sampled them."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from lmgym.algorithms.base import Terms, UpdateContext
from lmgym.algorithms.grpo import GRPO
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import seeds
from lmgym.core.constraints import PositiveFloat, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.losses import log_ratio, policy_gradient
from lmgym.types import Episode, Example, Turn

Group = list[Episode]


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
    buffer: list[Group] = field(default_factory=list, init=False, repr=False)
    fresh: list[Group] = field(default_factory=list, init=False, repr=False)  # of the step in flight
    key: int = field(default=0, init=False, repr=False)  # random key of the next step's draw

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replayed > self.capacity:
            raise LmgymError(
                f"algorithm.replayed is {self.replayed}, and the buffer holds capacity ({self.capacity}) groups; raise "
                "capacity, or lower replayed"
            )
        if self.truncate is not None and (self.objective != "clip" or self.ratio != "token"):
            raise LmgymError("algorithm.truncate takes the place of the objective; leave objective: clip, ratio: token")
        if self.importance_cap is not None:
            raise LmgymError("algorithm.importance_cap: replay's ratio is to the sampler already; leave it out")

    def select(self, groups: list[Group], wanted: int) -> tuple[list[Group], bool]:
        """The fresh groups, then copies of the replayed ones (the trainer renumbers what it is given)."""
        self.fresh, more = super().select(groups, wanted)
        now = max(episode.version for group in groups for episode in group)
        self.buffer = [group for group in self.buffer if now - group[0].version <= self.max_age]
        chosen = sorted(seeds.permutation(len(self.buffer), self.key, "replay")[: self.replayed].tolist())
        return [*self.fresh, *([replace(episode) for episode in self.buffer[index]] for index in chosen)], more

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        terms, metrics = super().loss(batch.replace(logprobs_old=batch.logprobs_sampler), new)
        if self.truncate is None:
            return terms, metrics
        ratio = log_ratio(new.logprobs.detach(), batch.require("logprobs_sampler")).exp()
        weighted = policy_gradient(new.logprobs, ratio.clamp(max=self.truncate) * batch.require("advantages"))
        cut = (ratio > self.truncate).to(ratio.dtype)
        return {**terms, "policy": (weighted, self.reduction)}, {**metrics, "ratio/clipped": cut}

    def after_update(self, context: UpdateContext) -> None:
        """Keep the groups of this step for those to come."""
        mixed = [group for group in self.fresh if len({episode.score for episode in group}) > 1]
        kept = [[_without_meta(episode) for episode in group] for group in mixed]
        self.buffer = [*self.buffer, *kept][-self.capacity :]
        self.fresh, self.key = [], seeds.key(*context.path, "step", context.step)

    def state_dict(self) -> dict[str, Any]:
        buffer = [[_plain(episode) for episode in group] for group in self.buffer]
        return {**super().state_dict(), "key": self.key, "buffer": buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.key = state["key"]
        self.buffer = [[_episode(tree) for tree in group] for group in state["buffer"]]


def _without_meta(episode: Episode) -> Episode:
    """What training and the logs read: `meta` is for rewards, which have been paid, and need not be JSON."""
    return replace(episode, example=replace(episode.example, meta={}))


def _plain(episode: Episode) -> dict[str, Any]:
    """An episode as JSON values. Floats come back from JSON bit for bit; packed kept sets go as base64."""
    turns = [{f.name: getattr(turn, f.name) for f in fields(Turn)} for turn in episode.turns]
    for turn in turns:
        if turn["kept"] is not None:
            turn["kept"] = [*turn["kept"].shape, base64.b64encode(turn["kept"].tobytes()).decode()]
    changed = {"example": episode.example.to_json(), "turns": turns}
    return {f.name: getattr(episode, f.name) for f in fields(Episode)} | changed


def _episode(tree: Mapping[str, Any]) -> Episode:
    """The way back from `_plain`."""
    turns = [Turn(**{**turn, "kept": _unpacked(turn["kept"])}) for turn in tree["turns"]]
    return Episode(**{**tree, "example": Example.from_json(tree["example"]), "turns": turns})


def _unpacked(kept: list[Any] | None) -> np.ndarray | None:
    if kept is None:
        return None
    rows, width, text = kept
    packed = base64.b64decode(text)
    form = np.uint8 if len(packed) == rows * width else np.int32  # functional/truncation.py
    return np.frombuffer(packed, dtype=form).reshape(rows, width).copy()
