"""RAFT: sample several answers, imitate the best (arXiv 2304.06767). Also known as expert iteration, best-of-n."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.types import Episode


@register("algorithm", "raft")
@dataclass(kw_only=True)
class RAFT(Algorithm):
    """loss = -mean over tokens of log pi(y_t), over the best `keep` answers of each group.

    With a `threshold` only answers that reach it are imitated (ReST's improve step, arXiv 2308.08998). Of equal scores
    the earlier answer is taken. There is no ratio to the policy that sampled, so `epochs` and `minibatches` are free.

    Example: every correct answer of eight, where not all eight are correct:
        >>> RAFT(group_size=8, keep=8, threshold=1.0, skip_equal=True)
    """

    group_size: PositiveInt = 8
    keep: PositiveInt = 1
    """Most answers of a group that are imitated."""
    threshold: float | None = None
    """Least score of an answer that is imitated."""
    skip_equal: bool = False
    """Leave out groups whose answers all have the same score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > self.group_size:
            raise LmgymError(f"algorithm.keep is {self.keep}; it must lie between 1 and group_size ({self.group_size})")
        if self.keep == self.group_size and self.threshold is None:
            raise LmgymError(
                f"algorithm.keep and group_size are both {self.keep}, so every answer would be imitated, good or bad; "
                "lower keep, or set a threshold"
            )

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The best of each group; more prompts only where no answer of any group will do."""
        picked = [self._best(group) for group in groups]
        return [group for group in picked if group], not any(picked)

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages=batch.actions.float())

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        return {"policy": (-new.logprobs, "token")}, {}

    def _best(self, group: list[Episode]) -> list[Episode]:
        if self.skip_equal and len({episode.score for episode in group}) == 1:
            return []
        ranked = sorted(group, key=lambda episode: -episode.score)  # stable: of equals, the earliest
        return [episode for episode in ranked[: self.keep] if self.threshold is None or episode.score >= self.threshold]
