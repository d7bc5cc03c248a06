"""Surrogates: what the loss makes of a token's ratio and advantage, and so how far one batch may move the policy.

The ratio r is pi_new / pi_old of a token. Each class is one surrogate, with its paper. A new one is a class here, or in
a file of yours, with `@register("surrogate", "its_name")`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt
from torch import Tensor

from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import Coefficient, NonNegativeFloat, PositiveFloat, Rule
from lmgym.core.errors import LmgymError
from lmgym.core.parts import Part
from lmgym.core.registry import register
from lmgym.functional import clips, losses
from lmgym.functional.shapes import PerToken

Ratio = Literal["token", "sequence", "sequence_token"]
"""token: each token's own. sequence: the geometric mean of a row's ratios, on each of its tokens (GSPO, arXiv
2507.18071). sequence_token: the same number, with the gradient of the token alone (GSPO-token)."""
TermAndMetrics = tuple[PerToken, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Surrogate(Part):
    """What is minimised, per token.

    Example: Clip(high=0.3).term(batch, new, losses.log_ratio(new.logprobs, batch.logprobs_old))"""

    kind: ClassVar[str] = "surrogate"
    section: ClassVar[str] = "algorithm.surrogate"

    weighs_rows: ClassVar[bool] = False
    """True if it weighs whole rows by their ratio already, which an importance weight would do twice."""

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        """The term [N T] and its metrics. `log_ratio` is log pi_new - log pi_old, within bounds that keep it finite;
        `batch.logprobs_old` is what the correction compares with, the sampler's included."""
        raise NotImplementedError(f"{type(self).__name__} has no term()")

    def checked_term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        """What `term` returns. Raises LmgymError for anything but a number for each token (or for all of a row, [N 1])
        and metrics: one number for the whole batch would train too, with another gradient."""
        returned, name = self.term(batch, new, log_ratio), f"{type(self).__name__}.term"
        if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise LmgymError(
                f"{name} returned a {type(returned).__name__}; return the term [N T] and a dictionary of metrics, {{}} "
                "for none"
            )
        shapes = (batch.actions.shape, (len(batch.actions), 1))
        if not isinstance(returned[0], Tensor) or returned[0].shape not in shapes:
            shape = list(getattr(returned[0], "shape", ()))
            raise LmgymError(f"{name} returned a term of shape {shape}, not one number for each token [N T]")
        return returned[0], returned[1]

    def check(self, credit: str | None, tokens: str | None) -> None:
        """Raise LmgymError where it has one ratio for a row, and a credit or a choice of tokens (its name is given)
        makes the advantages of a row's tokens differ."""
        if getattr(self, "ratio", "token") == "sequence" and (credit or tokens):
            raise LmgymError(
                f"algorithm.{tokens or credit} gives the tokens of a row advantages of their own, and with ratio: "
                "sequence each token gets the gradient of all of them; write ratio: sequence_token, which has the same "
                "values"
            )

    def clipped(self, ratio: PerToken, advantages: PerToken) -> PerToken | None:
        """1 where a token is clipped and has no gradient; None if this surrogate clips no single tokens."""
        return None


@register("surrogate", "clip")
@dataclass(frozen=True, kw_only=True)
class Clip(Surrogate):
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476)."""

    ratio: Ratio = "token"
    low: Coefficient = 0.2
    high: Coefficient = 0.28
    dual: Annotated[float, Gt(1), Rule("it bounds a ratio from above, so write 3 or so")] | None = None
    """Bound of the ratio where A < 0 (arXiv 1912.09729; verl: 3)."""

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = ratio_of(self.ratio, batch, new, log_ratio), batch.require("advantages")
        cut = losses.clipped(ratio, advantages, self.low, self.high, self.dual)
        term = losses.clipped_surrogate(ratio, advantages, self.low, self.high, self.dual)
        return term, {"ratio/mean": ratio, "ratio/clipped": cut}

    def clipped(self, ratio: PerToken, advantages: PerToken) -> PerToken | None:
        if self.ratio != "token":
            return None
        return losses.clipped(ratio, advantages, self.low, self.high, self.dual)


@register("surrogate", "cispo")
@dataclass(frozen=True, kw_only=True)
class Cispo(Surrogate):
    """-clip(sg(r), 1 - low, 1 + high) A log pi: every token keeps a gradient (CISPO, arXiv 2506.13585)."""

    ratio: Ratio = "token"
    low: Coefficient = 1.0
    high: Coefficient = 4.0

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = ratio_of(self.ratio, batch, new, log_ratio), batch.require("advantages")
        weight = losses.clipped_weight(ratio, self.low, self.high)
        cut = (weight != ratio.detach()).to(ratio.dtype)
        term = losses.policy_gradient(new.logprobs, weight * advantages)
        return term, {"ratio/mean": ratio, "ratio/clipped": cut}


@register("surrogate", "sapo")
@dataclass(frozen=True, kw_only=True)
class Sapo(Surrogate):
    """-4 / tau sigmoid(tau (r - 1)) A: a gate that closes softly (SAPO, arXiv 2511.20347)."""

    ratio: Ratio = "token"
    positive: PositiveFloat = 1.0
    """tau where A > 0."""
    negative: PositiveFloat = 1.05
    """tau where A <= 0; higher closes faster."""

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = ratio_of(self.ratio, batch, new, log_ratio), batch.require("advantages")
        gate, slope = losses.soft_gate(ratio, advantages, self.positive, self.negative)
        return -gate * advantages, {"ratio/mean": ratio, "ratio/gate": slope}


@register("surrogate", "dppo")
@dataclass(frozen=True, kw_only=True)
class Dppo(Surrogate):
    """-r A, without tokens whose probability has moved too far the way their advantage pushes (arXiv 2602.04879)."""

    low: Coefficient = 0.2
    """Bounds of the change of probability."""
    high: Coefficient = 0.2

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = log_ratio.exp(), batch.require("advantages")
        masked = losses.dppo_mask(new.logprobs, batch.require("logprobs_old"), advantages, self.low, self.high)
        return -ratio * advantages * ~masked, {"ratio/mean": ratio, "ratio/clipped": masked.to(ratio.dtype)}


@register("surrogate", "ipo_mask")
@dataclass(frozen=True, kw_only=True)
class IpoMask(Surrogate):
    """-r A, without the tokens whose probability has moved by more than `bound` either way (prime-rl's `ipo` loss)."""

    bound: Coefficient = 0.1

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = log_ratio.exp(), batch.require("advantages")
        masked = clips.probability_mask(new.logprobs, batch.require("logprobs_old"), self.bound)
        return -ratio * advantages * ~masked, {"ratio/mean": ratio, "ratio/clipped": masked.to(ratio.dtype)}


@register("surrogate", "gmpo")
@dataclass(frozen=True, kw_only=True)
class Gmpo(Surrogate):
    """-(geometric mean of a row's clipped ratios) A (GMPO, arXiv 2507.20673)."""

    low: Coefficient = 0.4
    """Log-ratios lie within -low and high."""
    high: Coefficient = 0.4

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        advantages = batch.require("advantages")
        ratio, masked = clips.geometric_mean_ratio(log_ratio, advantages, batch.actions, self.low, self.high)
        return -ratio * advantages, {"ratio/mean": ratio, "ratio/clipped": masked.to(ratio.dtype)}

    def check(self, credit: str | None, tokens: str | None) -> None:
        if credit:
            raise LmgymError(
                f"algorithm.{credit} gives the tokens of a row advantages of their own, and gmpo has one ratio for a "
                "row with one advantage; write surrogate: clip, or leave the credit out"
            )


@register("surrogate", "vespo")
@dataclass(frozen=True, kw_only=True)
class Vespo(Surrogate):
    """-sg(w^k exp(lambda (1 - w))) A log pi, where w is the whole row's ratio (VESPO, arXiv 2602.10693)."""

    weighs_rows: ClassVar[bool] = True

    power_positive: PositiveFloat = 2.0
    """k where A >= 0."""
    rate_positive: PositiveFloat = 3.0
    """lambda where A >= 0."""
    power_negative: PositiveFloat = 3.0
    rate_negative: PositiveFloat = 2.0

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        advantages = batch.require("advantages")
        positive, negative = (self.power_positive, self.rate_positive), (self.power_negative, self.rate_negative)
        weight = clips.gamma_weight(log_ratio, advantages, batch.actions, positive, negative)
        term = losses.policy_gradient(new.logprobs, weight * advantages)
        return term, {"ratio/mean": log_ratio.exp(), "ratio/gate": weight}


@register("surrogate", "ce_gppo")
@dataclass(frozen=True, kw_only=True)
class CeGppo(Surrogate):
    """PPO's clip, in which a clipped token keeps a bounded gradient (CE-GPPO, arXiv 2509.20712)."""

    ratio: Ratio = "token"
    low: Coefficient = 0.2
    high: Coefficient = 0.28
    keep_below: NonNegativeFloat = 0.75
    """Share of the gradient's size at the lower bound that a token below keeps (A < 0)."""
    keep_above: NonNegativeFloat = 1.0
    """The same above the upper bound (A > 0)."""

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = ratio_of(self.ratio, batch, new, log_ratio), batch.require("advantages")
        term, masked = clips.gradient_preserving_clip(
            ratio, advantages, self.low, self.high, self.keep_below, self.keep_above
        )
        return term, {"ratio/mean": ratio, "ratio/clipped": masked.to(ratio.dtype)}


@register("surrogate", "truncated_weight")
@dataclass(frozen=True, kw_only=True)
class TruncatedWeight(Surrogate):
    """-min(sg(r), cap) A log pi: truncated importance sampling of the policy gradient (arXiv 1802.01561)."""

    cap: PositiveFloat = 1.0

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio, advantages = log_ratio.exp(), batch.require("advantages")
        fixed = ratio.detach()
        cut = (fixed > self.cap).to(fixed.dtype)
        term = losses.policy_gradient(new.logprobs, fixed.clamp(max=self.cap) * advantages)
        return term, {"ratio/mean": ratio, "ratio/clipped": cut}


@register("surrogate", "none")
@dataclass(frozen=True, kw_only=True)
class Unbounded(Surrogate):
    """-r A: nothing bounds a step."""

    ratio: Ratio = "token"

    def term(self, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> TermAndMetrics:
        ratio = ratio_of(self.ratio, batch, new, log_ratio)
        return -ratio * batch.require("advantages"), {"ratio/mean": ratio}


def ratio_of(ratio: Ratio, batch: Batch, new: PolicyOutputs, log_ratio: PerToken) -> PerToken:
    """pi_new / pi_old of each token, or of its row."""
    if ratio == "sequence":
        log_ratio = losses.sequence_log_ratio(new.logprobs, batch.require("logprobs_old"), batch.actions)
    elif ratio == "sequence_token":
        log_ratio = clips.token_log_ratio_of_sequence(new.logprobs, batch.require("logprobs_old"), batch.actions)
    return log_ratio.exp()
