"""Self-certainty as a reward: a policy is paid for being sure of what it says (INTUITOR, arXiv 2505.19590)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lmgym.algorithms.grpo.credit import Credit, GroupMean
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch
from lmgym.core.constraints import PositiveFloat
from lmgym.core.errors import LmgymError
from lmgym.core.parts import check_part, part_name
from lmgym.core.registry import register
from lmgym.functional.answer_means import answer_means, shared_by_equals
from lmgym.functional.reductions import masked_mean
from lmgym.functional.shapes import PerRow, PerToken


@register("credit", "self_certainty")
@dataclass(frozen=True, kw_only=True)
class SelfCertainty(Credit):
    """R + coefficient * mean over the answer's tokens of KL(U || pi), compared within the group (INTUITOR, arXiv
    2505.19590): U is uniform over the vocabulary, pi the policy as it is before the first step on the batch. R is 0
    where a recipe has no rewards.

    Example: {name: self_certainty, compared_by: {name: leave_one_out}}"""

    coefficient: PositiveFloat = 1.0
    """Weight of the mean divergence, in nats."""
    compared_by: Credit = GroupMean(scale="group")  # noqa: RUF009 (frozen)
    """What makes advantages of the sums, as of scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part(Credit, self.compared_by)
        if self.compared_by.of_tokens or not self.compared_by.reads_score:
            raise LmgymError(
                f"algorithm.credit.compared_by is {part_name(self.compared_by)}, and self_certainty gives each answer "
                "one number that takes the place of its score; write group, leave_one_out or another that reads scores"
            )

    @property
    def caution(self) -> str:
        return (
            "credit self_certainty pays the policy for being sure, and not for being right: hold a real metric on "
            "held-out problems beside it, and stop where that falls"
        )

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        return self.compared_by.advantages(batch, score + (self.coefficient * certainty(batch)).to(score.dtype))

    def with_its_needs(self, required: Requirements) -> Requirements:
        required = self.compared_by.with_its_needs(required)
        names = (*required.distribution_sums, "uniform_divergence")
        return replace(required, reward="optional", distribution_sums=names)

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        self.compared_by.check(group_size, kl_in_reward, overlong)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        mean = masked_mean(batch.distribution_sum("uniform_divergence"), batch.actions)
        return {"self_certainty": float(mean), **self.compared_by.metrics(batch)}


def certainty(batch: Batch) -> PerRow:
    """The self-certainty of each row's episode (nats, float64 [N]); equal answers of a group have the same."""
    means = answer_means(batch.distribution_sum("uniform_divergence"), batch.actions, batch.episode)
    return shared_by_equals(means, batch.tokens, batch.mask, batch.episode, batch.group)
