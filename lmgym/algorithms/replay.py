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

    capacity: int = 64
    """Most groups kept; the oldest go first."""
    replayed: int = 8
    """Groups replayed in a step (fewer while fewer are kept)."""
    max_age: int = 8
    """Updates since a group was sampled after which it is dropped."""
    truncate: float | None = None
    """In place of the clip: the policy gradient of each token times min(r_t, this) (truncated importance weights)."""
    buffer: list[Group] = field(default_factory=list, init=False, repr=False)
    fresh: list[Group] = field(default_factory=list, init=False, repr=False)  # of the step in flight
    key: int = field(default=0, init=False, repr=False)  # random key of the next step's draw

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("capacity", "replayed", "max_age"):
            if getattr(self, name) < 1:
                raise LmgymError(f"algorithm.{name} is {getattr(self, name)}; it must be at least 1")
        if self.replayed > self.capacity:
            raise LmgymError(
                f"algorithm.replayed is {self.replayed}, and the buffer holds capacity ({self.capacity}) groups; raise "
                "capacity, or lower replayed"
            )
        if self.truncate is not None and not self.truncate > 0:
            raise LmgymError(f"algorithm.truncate is {self.truncate}; it must be above 0")
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
        return [*self.fresh, *([replace(episode) for episode in self.buffer[place]] for place in chosen)], more

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
        kept = [
            [_without_meta(episode) for episode in group] for group in self.fresh if len({e.score for e in group}) > 1
        ]
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
    own = episode.example
    return replace(episode, example=Example(own.id, own.prompt, own.references))


def _plain(episode: Episode) -> dict[str, Any]:
    """An episode as JSON values. Floats come back from JSON bit for bit; packed kept sets go as base64."""
    turns = [{f.name: getattr(turn, f.name) for f in fields(Turn)} for turn in episode.turns]
    for turn in turns:
        if turn["kept"] is not None:
            turn["kept"] = [*turn["kept"].shape, base64.b64encode(turn["kept"].tobytes()).decode()]
    prompt = episode.example.prompt
    example = {
        "id": episode.example.id,
        "prompt": prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
        "references": list(episode.example.references),
    }
    return {f.name: getattr(episode, f.name) for f in fields(Episode)} | {"example": example, "turns": turns}


def _episode(tree: Mapping[str, Any]) -> Episode:
    """The way back from `_plain`."""
    example = Example(tree["example"]["id"], tree["example"]["prompt"], tuple(tree["example"]["references"]))
    turns = [Turn(**{**turn, "kept": _unpacked(turn["kept"])}) for turn in tree["turns"]]
    return Episode(**{**tree, "example": example, "turns": turns})


def _unpacked(kept: list[Any] | None) -> np.ndarray | None:
    if kept is None:
        return None
    rows, width, text = kept
    packed = base64.b64decode(text)
    form = np.uint8 if len(packed) == rows * width else np.int32  # functional/truncation.py
    return np.frombuffer(packed, dtype=form).reshape(rows, width).copy()
