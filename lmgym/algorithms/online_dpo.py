"""Online DPO: pairs from the policy's own answers, judged by any reward (arXiv 2402.04792)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from lmgym.algorithms.dpo import DPO
from lmgym.algorithms.requirements import Requirements
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.parts import documentation
from lmgym.core.registry import register
from lmgym.types import Episode


@register("algorithm", "online_dpo")
@dataclass(kw_only=True)
class OnlineDPO(DPO):
    """DPO whose pairs are the best and the worst of each group of sampled answers. Only the order of the rewards
    counts.

    Example: SimPO on sampled pairs, which needs no reference:
        >>> build(OnlineDPO, OnlineDPO.presets["simpo"], "algorithm.")
    """

    group_size: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise LmgymError(f"algorithm.group_size is {self.group_size}; a pair needs at least 2 answers")

    @property
    def formulas(self) -> Mapping[str, str]:
        return {**super().formulas, "preference": documentation(DPO)}

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, answers="policy")

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The best and the worst of each group whose scores differ. Where none does, more prompts are drawn, and at
        last the first group is a placeholder for a step that changes nothing."""
        mixed = [group for group in groups if len({episode.score for episode in group}) > 1]
        score = attrgetter("score")
        pairs = [[max(group, key=score), min(group, key=score)] for group in mixed]  # of equals the earliest
        return pairs or groups[:1], not pairs
