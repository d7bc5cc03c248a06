"""What every algorithm has that compares the answers to one prompt with each other: GRPO's family, and your own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lmgym.algorithms.grpo.credit import Credit, GroupMean
from lmgym.algorithms.regularised import Regularised
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch
from lmgym.core.constraints import Rule, Share
from lmgym.core.errors import LmgymError
from lmgym.core.parts import check_part, documentation
from lmgym.functional.advantages import mixed_groups
from lmgym.functional.group_advantages import overlong_penalty
from lmgym.functional.turn_discounts import longest_turns
from lmgym.types import Episode


@dataclass(kw_only=True)
class GroupRelative(Regularised):
    """Groups of answers, and the credit of their tokens. Extend it for a loss of your own (docs/extending.md).

    Example:
        >>> @dataclass(kw_only=True)
        ... class Mine(GroupRelative):
        ...     def loss(self, batch, new):
        ...         return {"policy": (-batch.advantages * new.logprobs, "token")}, {}
    """

    group_size: Annotated[int, Ge(2), Rule("grpo needs at least 2 answers per prompt")] = 8
    credit: Credit = GroupMean()  # noqa: RUF009 (frozen)
    """What a token's advantage is."""
    overlong: Share = 0.0
    """A score loses up to 1, as the longest turn fills this last share of max_new_tokens (DAPO's soft overlong
    punishment)."""
    dynamic_sampling: bool = False
    """Draw until there are prompts_per_step groups whose scores differ, up to the stage's max_draws (DAPO)."""
    mask_truncated: bool = False
    """Episodes that were cut off have no tokens in the loss; their scores still count in their group's mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part(Credit, self.credit)
        kl_in_reward = self.kl_coefficient > 0 and self.kl_in == "reward"
        self.credit.check(self.group_size, kl_in_reward, self.overlong > 0)
        if self.dynamic_sampling and self.requirements.reward is not True:
            raise LmgymError(
                "algorithm.dynamic_sampling chooses groups by their rewards, and this credit pays for what is known "
                "only when they are scored; write dynamic_sampling: false"
            )

    @property
    def caution(self) -> str:
        return self.credit.caution

    @property
    def formulas(self) -> Mapping[str, str]:
        return {**super().formulas, "A": documentation(type(self.credit))}

    @property
    def requirements(self) -> Requirements:
        return self.credit.with_its_needs(super().requirements)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {**super().metrics(batch), **self.credit.metrics(batch)}

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """All groups; or, with dynamic sampling, the first `wanted` whose scores differ. Where none does, as in a task
        that is solved, the first group is a placeholder, and the step changes nothing."""
        if not self.dynamic_sampling:
            return groups, False
        mixed = [group for group in groups if len({episode.score for episode in group}) > 1]
        return mixed[:wanted] or groups[:1], len(mixed) < wanted

    def advantages(self, batch: Batch) -> Batch:
        # Scores, less the penalties that are taken of whole answers.
        score = self.penalised_score(batch)
        if self.overlong:
            if batch.limit is None:
                raise LmgymError("algorithm.overlong needs the token limit of an answer; give collate(limit=...)")
            longest = longest_turns(batch.actions, batch.require("turn"), batch.episode)
            penalty = overlong_penalty(longest, batch.limit, self.overlong).to(score.dtype)
            if self.dynamic_sampling:  # a placeholder group of equal scores must have zero advantages
                penalty = penalty * mixed_groups(batch.score, batch.group)
            score = score + penalty
        # The credit of each token; what was cut off may have none.
        advantages = self.credit.advantages(batch, score)
        if self.mask_truncated:
            batch = batch.replace(actions=batch.actions & batch.terminated[:, None])
        return batch.replace(advantages=advantages * batch.actions)
