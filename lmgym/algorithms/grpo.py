"""GRPO (group-relative policy optimisation, arXiv 2402.03300) and its family, whose other members are presets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.regularised import Regularised
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, FormerKey, PositiveFloat, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional import losses
from lmgym.functional.reductions import Reduction
from lmgym.functional.reward_components import gdpo_advantages
from lmgym.types import Episode


@register("algorithm", "grpo")
@dataclass(kw_only=True)
class GRPO(Regularised):
    """loss = sum_t -min(r_t A, clip(r_t, 1 - low, 1 + high) A) / tokens, A = R - mean of the group.

    The plain name centres without dividing by the group's standard deviation (arXiv 2503.20783), sums over the tokens
    of the whole optimizer batch and clips asymmetrically (arXiv 2503.14476), and has no reference model. The preset
    `paper` is the first paper's own form; the others are names of algorithms as well: {name: dapo, group_size: 8}.

    Example: {name: grpo, group_size: 8, objective: cispo, clip_low: 1.0, clip_high: 4.0, minibatches: 4}
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # arXiv 2402.03300, section 4.2; it does not state its clip
        "paper": {"group_size": 64, "clip_high": 0.2, "scale_rewards": "group", "reduction": "sequence",
                  "kl_coefficient": 0.04},
        # arXiv 2503.20783, section 3.2 and listing 1
        "dr_grpo": {"group_size": 8, "clip_high": 0.2, "scale_rewards": "none", "reduction": "constant",
                    "length_norm": True},
        # arXiv 2503.14476, section 4.1: 512 prompts of 16 answers, 512 answers an optimizer step
        "dapo": {"group_size": 16, "minibatches": 16, "clip_low": 0.2, "clip_high": 0.28, "scale_rewards": "group",
                 "reduction": "token", "dynamic_sampling": True},
        # arXiv 2507.18071, section 5.1
        "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "scale_rewards": "group",
                 "reduction": "sequence", "minibatches": 4},
        # arXiv 2506.13585, section 3.1, without the upper bound's value: 5, from arXiv 2510.13786
        "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "scale_rewards": "group",
                  "reduction": "token"},
        # arXiv 2511.20347
        "sapo": {"objective": "sapo", "sapo_positive": 1.0, "sapo_negative": 1.05, "scale_rewards": "group",
                 "reduction": "sequence", "minibatches": 4},
        # prime-rl's default loss: arXiv 2602.04879 with a bound of 0.2, and arXiv 2602.02276's square
        "dppo": {"objective": "dppo", "ratio_to": "sampler", "clip_low": 0.2, "clip_high": 0.2,
                 "squared_log_ratio_coefficient": 1e-3, "scale_rewards": "none", "reduction": "token"},
    }  # fmt: skip

    group_size: Annotated[int, Ge(2), Rule("grpo needs at least 2 answers per prompt")] = 8
    objective: Literal["clip", "cispo", "sapo", "dppo"] = "clip"
    """What bounds a step: the clipped surrogate, a clipped weight, a soft gate, or a mask on changes of probability."""
    ratio: losses.Level = "token"
    """sequence: the geometric mean of a row's ratios, on each of its tokens (GSPO)."""
    ratio_to: Literal["old", "sampler"] = "old"
    """The policy below the ratio's bar: the trainer's before this batch's steps, or what the sampler said of itself."""
    clip_low: Coefficient = 0.2
    """clip, cispo: the ratio's bounds are 1 - clip_low and 1 + clip_high. dppo: bounds of the change of probability."""
    clip_high: Coefficient = 0.28
    dual_clip: Annotated[float, Gt(1), Rule("it bounds a ratio from above, so write 3 or so")] | None = None
    """clip: bound of the ratio where A < 0 (verl: 3)."""
    sapo_positive: PositiveFloat = 1.0
    """sapo: the gate's temperature where A > 0."""
    sapo_negative: PositiveFloat = 1.05
    """sapo: where A <= 0; higher closes faster."""
    squared_log_ratio_coefficient: Annotated[Coefficient, FormerKey("drift_coefficient")] = 0.0
    """Weight of (log r_t)^2 in the loss, on tokens with an advantage."""
    scale_rewards: credit.Scale = "none"
    """Divide by the standard deviation of the group's scores, or of the batch's, + 1e-4."""
    normalise_parts: bool = False
    """Scale each reward within its group before the weighted sum, and the sum over the batch (GDPO)."""
    dynamic_sampling: bool = False
    """Draw until there are prompts_per_step groups whose scores differ, up to the stage's max_draws (DAPO)."""
    mask_truncated: bool = False
    """Episodes that were cut off have no tokens in the loss; their scores still count in their group's mean."""
    importance_cap: PositiveFloat | None = None
    """Weigh the policy's term by min(pi_old / the sampler's probability, this) (truncated importance sampling)."""
    importance_level: losses.Level = "token"
    """sequence: the product over the row."""
    reduction: Reduction = "token"
    length_norm: bool = False
    """reduction: constant: divide by the stage's max_new_tokens besides (Dr. GRPO)."""
    kl_in: Literal["reward", "loss"] = "loss"

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            raise LmgymError(
                f"algorithm.scale_rewards is {self.scale_rewards}; write group for true, none for false, or batch"
            )
        super().__post_init__()
        self._check_together()

    def _check_together(self) -> None:
        """Raise LmgymError where one field would leave another unread, or count something twice."""
        if self.dual_clip is not None and self.objective != "clip":
            raise LmgymError(f"algorithm.dual_clip belongs to objective: clip, and objective is {self.objective}")
        if self.objective == "dppo" and self.ratio == "sequence":
            raise LmgymError("algorithm.ratio is sequence, and objective dppo looks at single tokens; write token")
        if self.importance_cap is not None and self.ratio_to == "sampler":
            raise LmgymError(
                "algorithm.importance_cap and ratio_to: sampler correct for the same difference; leave one of them out"
            )
        if self.length_norm and self.reduction != "constant":
            raise LmgymError(
                f"algorithm.length_norm goes with reduction: constant, and reduction is {self.reduction}; the others "
                "divide by lengths already"
            )
        if self.normalise_parts and self.scale_rewards != "none":
            raise LmgymError("algorithm.normalise_parts scales by itself; set scale_rewards to none")
        if self.normalise_parts and self.kl_coefficient and self.kl_in == "reward":
            raise LmgymError(
                "algorithm.normalise_parts scales every reward, so a KL penalty in the reward would lose its "
                "coefficient; write kl_in: loss"
            )

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, reward_components=self.normalise_parts)

    @property
    def weighs_old(self) -> bool:
        return self.importance_cap is not None or self.ratio_to == "sampler"

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """All groups; or, with dynamic sampling, the first `wanted` whose scores differ. Where none does, as in a task
        that is solved, the first group stands in for a step that moves nothing."""
        if not self.dynamic_sampling:
            return groups, False
        mixed = [group for group in groups if len({episode.score for episode in group}) > 1]
        return mixed[:wanted] or groups[:1], len(mixed) < wanted

    def advantages(self, batch: Batch) -> Batch:
        self._check_columns(batch)
        score = self.penalised_score(batch)
        if self.normalise_parts:
            components = batch.require("reward_components")
            weights = torch.tensor(batch.component_weights, dtype=components.dtype, device=components.device)
            per_row = gdpo_advantages(components, weights, batch.episode, batch.group)
        else:
            per_row = credit.group_centred(score, batch.episode, batch.group, self.scale_rewards)
        if self.mask_truncated:
            batch = batch.replace(actions=batch.actions & batch.terminated[:, None])
        return batch.replace(advantages=batch.per_token(per_row))

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        metrics: dict[str, Tensor] = {}
        weight: Tensor | float = 1.0
        if self.importance_cap is not None:
            old, sampler = batch.require("logprobs_old"), batch.require("logprobs_sampler")
            importance = losses.importance_ratio(old, sampler, batch.actions, self.importance_level)
            weight = importance.clamp(max=self.importance_cap)
            capped = (importance > self.importance_cap).to(importance.dtype)
            metrics |= {"importance/mean": weight, "importance/capped": capped}
        if self.ratio_to == "sampler":
            batch = batch.replace(logprobs_old=batch.logprobs_sampler)
        difference = losses.log_ratio(new.logprobs, batch.require("logprobs_old"))
        policy, measured = self._objective(batch, new, difference)
        terms: Terms = {"policy": (weight * policy, self.reduction)}
        terms |= self.regularising_terms(batch, new, self.reduction)
        if self.squared_log_ratio_coefficient:
            drift = self.squared_log_ratio_coefficient * difference**2 * (batch.require("advantages") != 0)
            terms["drift"] = (drift, self.reduction)
        if self.length_norm:
            assert batch.limit is not None  # see _check_columns
            scale = {"constant": 1.0 / batch.limit}
            terms = {name: (scale.get(how, 1.0) * term, how) for name, (term, how) in terms.items()}
        return terms, metrics | measured | {"kl/old": difference.exp() - 1 - difference}

    def _objective(
        self, batch: Batch, new: PolicyOutputs, difference: Float[Tensor, "N T"]
    ) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
        """The policy's term per token, to be minimised, and what is measured of it."""
        old, credits = batch.require("logprobs_old"), batch.require("advantages")
        low, high = self.clip_low, self.clip_high
        if self.ratio == "sequence":
            difference = losses.sequence_log_ratio(new.logprobs, old, batch.actions)
        ratio = difference.exp()
        measured = {"ratio/mean": ratio}
        if self.objective == "sapo":
            gate, slope = losses.soft_gate(ratio, credits, self.sapo_positive, self.sapo_negative)
            return -gate * credits, {**measured, "ratio/gate": slope}
        if self.objective == "cispo":
            weight = losses.clipped_weight(ratio, low, high)
            cut = (weight != ratio.detach()).to(ratio.dtype)
            return losses.policy_gradient(new.logprobs, weight * credits), {**measured, "ratio/clipped": cut}
        if self.objective == "dppo":
            masked = losses.dppo_mask(new.logprobs, old, credits, low, high)
            return -ratio * credits * ~masked, {**measured, "ratio/clipped": masked.to(ratio.dtype)}
        cut = losses.clipped(ratio, credits, low, high, self.dual_clip)
        return losses.clipped_surrogate(ratio, credits, low, high, self.dual_clip), {**measured, "ratio/clipped": cut}

    def _check_columns(self, batch: Batch) -> None:
        """Raise LmgymError where the batch lacks what a field asks for; the trainer's own batches have it."""
        if batch.logprobs_sampler is None and (self.importance_cap is not None or self.ratio_to == "sampler"):
            raise LmgymError(
                "algorithm.importance_cap and ratio_to: sampler need the sampler's log-probabilities, and some turn of "
                "this batch has none"
            )
        if self.length_norm and batch.limit is None:
            raise LmgymError("algorithm.length_norm needs the token limit of an answer; give collate(limit=...)")
        if self.normalise_parts and batch.reward_components is None:
            raise LmgymError("algorithm.normalise_parts needs the parts of the score; give collate(weights=...)")


for preset in ("dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo"):  # names that mean grpo with the preset of that name
    register("algorithm", preset)(GRPO)
