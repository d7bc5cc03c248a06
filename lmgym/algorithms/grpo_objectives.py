"""What GRPO's `objective` makes of a token's ratio: the policy's term, to be minimised, and what is measured of it."""

from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.grpo_fields import GRPOFields
from lmgym.batch import Batch, PolicyOutputs
from lmgym.functional import clips, losses


def policy_term(
    fields: GRPOFields, batch: Batch, new: PolicyOutputs, difference: Float[Tensor, "N T"]
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """The term per token [N T] and its metrics. `difference` is log pi_new - log pi_old, clamped; `logprobs_old` of the
    batch is what the ratio's bar stands on, the sampler's included."""
    old, credits, actions = batch.require("logprobs_old"), batch.require("advantages"), batch.actions
    low, high = fields.clip_low, fields.clip_high
    if fields.objective == "gmpo":
        ratio, masked = clips.geometric_mean_ratio(difference, credits, actions, low, high)
        return -ratio * credits, {"ratio/mean": ratio, "ratio/clipped": masked.to(ratio.dtype)}
    if fields.ratio == "sequence":
        difference = losses.sequence_log_ratio(new.logprobs, old, actions)
    if fields.ratio == "sequence_token":
        difference = clips.token_log_ratio_of_sequence(new.logprobs, old, actions)
    ratio = difference.exp()
    measured = {"ratio/mean": ratio}
    if fields.objective == "sapo":
        gate, slope = losses.soft_gate(ratio, credits, fields.sapo_positive, fields.sapo_negative)
        return -gate * credits, {**measured, "ratio/gate": slope}
    if fields.objective == "vespo":
        positive = (fields.vespo_power_positive, fields.vespo_rate_positive)
        negative = (fields.vespo_power_negative, fields.vespo_rate_negative)
        weight = clips.gamma_weight(difference, credits, actions, positive, negative)
        return losses.policy_gradient(new.logprobs, weight * credits), {**measured, "ratio/gate": weight}
    if fields.objective == "cispo":
        weight = losses.clipped_weight(ratio, low, high)
        cut = (weight != ratio.detach()).to(ratio.dtype)
        return losses.policy_gradient(new.logprobs, weight * credits), {**measured, "ratio/clipped": cut}
    if fields.objective in ("dppo", "ipo"):
        if fields.objective == "dppo":
            masked = losses.dppo_mask(new.logprobs, old, credits, low, high)
        else:
            masked = clips.probability_mask(new.logprobs, old, high)
        return -ratio * credits * ~masked, {**measured, "ratio/clipped": masked.to(ratio.dtype)}
    if fields.objective == "ce_gppo":
        term, masked = clips.gradient_preserving_clip(ratio, credits, low, high, fields.keep_below, fields.keep_above)
        return term, {**measured, "ratio/clipped": masked.to(ratio.dtype)}
    if fields.objective == "none":
        return -ratio * credits, measured
    cut = losses.clipped(ratio, credits, low, high, fields.dual_clip)
    return losses.clipped_surrogate(ratio, credits, low, high, fields.dual_clip), {**measured, "ratio/clipped": cut}
