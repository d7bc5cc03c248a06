"""The fields of GRPO and its family: its section of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from lmgym.algorithms.grpo_presets import PRESETS
from lmgym.algorithms.regularised import Regularised
from lmgym.core.constraints import Coefficient, FormerKey, NonNegativeFloat, PositiveFloat, Rule, Share
from lmgym.functional.importance import Outside
from lmgym.functional.losses import Level
from lmgym.functional.reductions import Reduction

Objective = Literal["clip", "cispo", "sapo", "dppo", "ipo", "gmpo", "ce_gppo", "vespo", "none"]


@dataclass(kw_only=True)
class GRPOFields(Regularised):
    """What a recipe may say of GRPO. By family: the ratio and its bounds, importance correction, advantages, tokens.

    Example: GRPO(objective="sapo").sapo_negative -> 1.05
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    group_size: Annotated[int, Ge(2), Rule("grpo needs at least 2 answers per prompt")] = 8
    objective: Objective = "clip"
    """What bounds a step: the clipped surrogate, a clipped weight, a soft gate, a mask on changes of probability ..."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """sequence: the geometric mean of a row's ratios, on each of its tokens (GSPO). sequence_token: the same number,
    with the gradient of the token alone (GSPO-token)."""
    ratio_to: Literal["old", "sampler"] = "old"
    """The policy below the ratio's bar: the trainer's before this batch's steps, or what the sampler said of itself."""
    clip_low: Coefficient = 0.2
    """clip, cispo, ce_gppo: the ratio's bounds are 1 - clip_low and 1 + clip_high. gmpo: the log-ratio's are -clip_low
    and clip_high. dppo: bounds of the change of probability; ipo: clip_high alone."""
    clip_high: Coefficient = 0.28
    dual_clip: Annotated[float, Gt(1), Rule("it bounds a ratio from above, so write 3 or so")] | None = None
    """clip: bound of the ratio where A < 0 (verl: 3)."""
    sapo_positive: PositiveFloat = 1.0
    """sapo: the gate's temperature where A > 0."""
    sapo_negative: PositiveFloat = 1.05
    """sapo: where A <= 0; higher closes faster."""
    keep_below: NonNegativeFloat = 0.75
    """ce_gppo: share of the gradient's size at the lower bound that a token below keeps (A < 0)."""
    keep_above: NonNegativeFloat = 1.0
    """ce_gppo: the same above the upper bound (A > 0)."""
    vespo_power_positive: PositiveFloat = 2.0
    """vespo: k of the row's weight w^k exp(lambda (1 - w)) where A >= 0."""
    vespo_rate_positive: PositiveFloat = 3.0
    """vespo: its lambda."""
    vespo_power_negative: PositiveFloat = 3.0
    """vespo: k where A < 0."""
    vespo_rate_negative: PositiveFloat = 2.0
    """vespo: lambda where A < 0."""
    squared_log_ratio_coefficient: Annotated[Coefficient, FormerKey("drift_coefficient")] = 0.0
    """Weight of (log r_t)^2 in the loss, on tokens with an advantage."""
    top_entropy: Annotated[float, Gt(0), Le(1), Rule("it is the share of tokens that train, above 0 and up to 1")] = 1.0
    """This share of an optimizer step's tokens trains, those of the largest entropy."""
    covariance: Literal["none", "clip", "penalise"] = "none"
    """Tokens of large covariance of advantage and log-probability: leave some out (clip-cov), or penalise the change of
    the largest (kl-cov)."""
    covariance_share: Annotated[float, Gt(0), Le(1)] = 2e-4
    """Of an optimizer step's tokens, one at least."""
    covariance_low: float = 1.0
    """clip: those left out are drawn from the tokens with a covariance above this ..."""
    covariance_high: float = 5.0
    """... and below this."""
    covariance_coefficient: Coefficient = 1.0
    """penalise: weight of |log r_t| on the chosen tokens."""
    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divide by the standard deviation of the group's scores, or of the batch's, + 1e-4, or by the group's mean."""
    scale_by_mixed: bool = False
    """Multiply by answers / answers in groups whose scores differ (GPG)."""
    baseline: Literal["mean", "length", "token"] = "mean"
    """What is taken off the scores of a group: their mean; their mean weighted by the answers' lengths (OPO); at each
    token, their mean weighted by the squared gradients of the answers up to there (the optimal token baseline)."""
    pass_at: Annotated[int, Ge(2), Rule("the best of 1 answer is the answer, so it must be at least 2")] | None = None
    """A is what an answer adds to the best of so many answers of its group (PKPO)."""
    keep: Annotated[int, Ge(2), Rule("a group's mean needs at least 2 answers")] | None = None
    """So many answers of each group train; the others have no advantage and are not in the group's mean (GFPO)."""
    keep_by: Literal["length", "score_per_token"] = "length"
    """keep: the shortest, or those with the most score for a token."""
    turn_coefficient: Coefficient = 0.0
    """Weight of a second advantage, a turn's return against the group's turns that answered the same text (GiGPO)."""
    turn_gamma: Share = 0.95
    """Discount of that return, per turn."""
    turn_history: Annotated[int, Ge(0), Rule("it is a number of turns, 0 or more")] = 0
    """The second advantage is also computed among turns that have answered the same texts so many turns back, and those
    advantages are averaged (HGPO)."""
    turn_history_power: NonNegativeFloat = 1.0
    """An advantage with k earlier turns in common weighs (k + 2) to this power."""
    episode_coefficient: Coefficient = 1.0
    """Weight of the first advantage, of the whole episode's score, beside that of its turns (HGPO: 0)."""
    overlong: Share = 0.0
    """A score loses up to 1, as the longest turn fills this last share of max_new_tokens (DAPO's soft overlong
    punishment)."""
    normalise_parts: bool = False
    """Scale each reward within its group before the weighted sum, and the sum over the batch (GDPO)."""
    dynamic_sampling: bool = False
    """Draw until there are prompts_per_step groups whose scores differ, up to the stage's max_draws (DAPO)."""
    mask_truncated: bool = False
    """Episodes that were cut off have no tokens in the loss; their scores still count in their group's mean."""
    importance_cap: PositiveFloat | None = None
    """Weigh the policy's term by pi_old / the sampler's probability, at most this (truncated importance sampling)."""
    importance_floor: PositiveFloat | None = None
    """The least weight."""
    importance_level: Level = "token"
    """sequence: the product over the row."""
    importance_outside: Outside = "truncate"
    """What a ratio outside of the two bounds weighs: the nearer bound, or (mask) 0: it is left out."""
    mismatch_bound: Annotated[float, Gt(1), Rule("it bounds a ratio and its inverse, so write 1.001 or so")] | None = (
        None
    )
    """Leave out rows whose geometric mean of pi_old / the sampler's probability is above this or below its inverse."""
    off_policy_threshold: PositiveFloat | None = None
    """Leave out rows with A < 0 that are less likely now than when sampled, by more than this (nats per token)."""
    reduction: Reduction = "token"
    length_norm: bool = False
    """reduction: constant: divide by the stage's max_new_tokens besides (Dr. GRPO)."""
    kl_in: Literal["reward", "loss"] = "loss"

    @property
    def bounds_importance(self) -> bool:
        """True if the loss is weighted by the importance ratio."""
        return self.importance_cap is not None or self.importance_floor is not None

    @property
    def reads_sampler(self) -> bool:
        """True if weights or masks compare with the sampler's probabilities."""
        return self.bounds_importance or self.mismatch_bound is not None or self.off_policy_threshold is not None
