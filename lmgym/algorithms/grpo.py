"""GRPO: group-relative policy optimisation (arXiv 2402.03300), with the defaults the field has converged on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.regularised import Regularised
from lmgym.batch import Batch, Scored
from lmgym.errors import LmgymError
from lmgym.maths import advantages as credit
from lmgym.maths.losses import clipped, clipped_surrogate, log_ratio
from lmgym.maths.reductions import Reduction
from lmgym.registry import register


@register("algorithm", "grpo")
@dataclass(kw_only=True)
class GRPO(Regularised):
    """loss = sum_t -min(r_t A, clip(r_t, 1 - low, 1 + high) A) / tokens, A = R - mean of the group.

    The plain name centres without dividing by the group's standard deviation (arXiv 2503.20783), sums over the tokens
    of the whole optimizer batch and clips asymmetrically (arXiv 2503.14476), and has no reference model. The paper's
    own form is `scale_rewards: true, reduction: sequence, clip_high: 0.2, kl_coefficient: 0.04`.
    """

    group_size: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    scale_rewards: bool = False
    """Divide by the group's unbiased standard deviation + 1e-4."""
    reduction: Reduction = "token"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["reward", "loss"] = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise LmgymError(f"algorithm.group_size is {self.group_size}; grpo needs at least 2 answers per prompt")

    def advantages(self, batch: Batch) -> Batch:
        score = self.penalised_score(batch)
        per_row = credit.group_centred(score, batch.episode, batch.group, scale=self.scale_rewards)
        return batch.with_(advantages=batch.per_token(per_row))

    def loss(self, batch: Batch, new: Scored) -> tuple[Terms, Mapping[str, Tensor]]:
        assert batch.advantages is not None and batch.logprobs_old is not None
        difference = log_ratio(new.logprobs, batch.logprobs_old)
        ratio = difference.exp()
        surrogate = clipped_surrogate(ratio, batch.advantages, self.clip_low, self.clip_high)
        return {"policy": (surrogate, self.reduction), **self.regularising_terms(batch, new, self.reduction)}, {
            "ratio/mean": ratio,
            "ratio/clipped": clipped(ratio, batch.advantages, self.clip_low, self.clip_high),
            "kl/old": ratio - 1 - difference,
        }
