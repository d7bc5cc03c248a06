"""NLPO: PPO whose training answers are drawn from the tokens that a mask policy finds likely (arXiv 2210.01241)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.base import UpdateContext
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import truncation
from lmgym.types import Restriction


@register("algorithm", "nlpo")
@dataclass(kw_only=True)
class NLPO(PPO):
    """Natural language policy optimisation (arXiv 2210.01241, algorithm 1): PPO on a restricted vocabulary.

        K_t = the likeliest tokens of the mask policy with top_mask of its mass, min_tokens_to_keep at least,
              and the special tokens
        pi_K(y) = pi(y) / sum of pi over K_t for y in K_t, else 0

    Sampling, ratio, KL and entropy are those of pi_K. The mask policy is a frozen copy of the policy, taken anew every
    `refresh_every` steps. Everything else, presets too, is PPO's; `compat: rl4lms` is what that system's code did
    instead. Evaluations sample the plain policy: it is what is saved.

    Example: {name: nlpo, mask_type: learned_top_p, top_mask: 0.9, min_tokens_to_keep: 100, refresh_every: 5}"""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl4lms": {**PPO.presets["rl4lms"], "mask_type": "learned_top_p", "top_mask": 0.9, "min_tokens_to_keep": 100,
                   "refresh_every": 1000},
        "trl": PPO.presets["trl"],
    }  # fmt: skip

    mask_type: Literal["learned_top_p", "learned_top_k", "top_k"] = "learned_top_p"
    """learned_top_p, learned_top_k: by the mask policy; top_k: the sampled policy's own likeliest tokens."""
    top_mask: float = 0.9
    """learned_top_p: share of the mask policy's mass that is kept, up to 1; the others: number of tokens."""
    min_tokens_to_keep: PositiveInt = 100
    """Tokens that are kept at least, whatever top_mask says."""
    refresh_every: PositiveInt = 5
    """Steps after which the mask policy becomes a copy of the policy again."""
    compat: Literal["none", "rl4lms"] = "none"
    """rl4lms: the mask policy stays the first one, and ratio and KL take log-probabilities over the whole vocabulary,
    although sampling was restricted; its entropy is E_K[-log pi]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_type == "learned_top_p" and not 0 < self.top_mask <= 1:
            raise LmgymError(
                f"algorithm.top_mask is {self.top_mask}; with mask_type learned_top_p it is a share of the probability "
                "mass, above 0 and at most 1"
            )
        if self.mask_type != "learned_top_p" and (not self.top_mask >= 1 or self.top_mask % 1):
            raise LmgymError(
                f"algorithm.top_mask is {self.top_mask}; with mask_type {self.mask_type} it is a number of tokens, "
                "such as 50"
            )

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, mask=self.mask_type != "top_k")

    @property
    def restriction(self) -> Restriction:
        rule: Literal["top_p", "top_k"] = "top_p" if self.mask_type == "learned_top_p" else "top_k"
        return Restriction(rule=rule, amount=self.top_mask, least=self.min_tokens_to_keep)

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        if self.min_tokens_to_keep > size:
            raise LmgymError(
                f"algorithm.min_tokens_to_keep is {self.min_tokens_to_keep}, and the model's vocabulary has {size} "
                "tokens, so nothing would be masked; lower it"
            )

    def before_scoring(self, batch: Batch) -> Batch:
        if self.compat == "none" or batch.sampling_mask is None:
            return batch
        return batch.replace(sampling_mask=replace(batch.sampling_mask, renormalised=False))

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        if batch.sampling_mask is None or batch.vocabulary is None:
            return super().metrics(batch)
        tokens = float(truncation.sizes(batch.sampling_mask.bits).double().mean())
        return {**super().metrics(batch), "kept/tokens": tokens, "kept/share": tokens / batch.vocabulary}

    def after_update(self, context: UpdateContext) -> None:
        super().after_update(context)
        if self.requirements.mask and self.compat == "none" and context.step % self.refresh_every == 0:
            context.refresh("mask")
