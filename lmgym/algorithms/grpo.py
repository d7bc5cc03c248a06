"""GRPO (group-relative policy optimisation, arXiv 2402.03300) and its family, whose other members are presets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.algorithms.base import Terms
from lmgym.algorithms.grpo_checks import check_together
from lmgym.algorithms.grpo_fields import GRPOFields
from lmgym.algorithms.grpo_objectives import policy_term
from lmgym.algorithms.grpo_presets import PRESETS
from lmgym.algorithms.grpo_tokens import chosen_tokens
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional import advantages as credit
from lmgym.functional import group_advantages, importance, losses, token_baseline
from lmgym.functional.reductions import masked_mean, tokens_of_episode, totals, weights
from lmgym.functional.reward_components import gdpo_advantages
from lmgym.functional.turn_discounts import longest_turns, turn_returns
from lmgym.functional.turn_groups import turn_group_advantages
from lmgym.types import Episode


@register("algorithm", "grpo")
@dataclass(kw_only=True)
class GRPO(GRPOFields):
    """loss = sum_t -min(r_t A, clip(r_t, 1 - low, 1 + high) A) / tokens, A = R - mean of the group.

    The plain name centres without dividing by the group's standard deviation (arXiv 2503.20783), sums over the tokens
    of the whole optimizer batch and clips asymmetrically (arXiv 2503.14476), and has no reference model. The preset
    `paper` is the first paper's own form; the others are names of algorithms as well: {name: dapo, group_size: 8}.

    Example: {name: grpo, group_size: 8, objective: cispo, clip_low: 1.0, clip_high: 4.0, minibatches: 4}
    """

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            raise LmgymError(
                f"algorithm.scale_rewards is {self.scale_rewards}; write group for true, none for false, or batch"
            )
        super().__post_init__()
        check_together(self)

    @property
    def requirements(self) -> Requirements:
        required = super().requirements
        entropy = required.entropy or self.top_entropy < 1
        squared = self.baseline == "token"
        return replace(
            required, reward_components=self.normalise_parts, entropy=entropy, squared_probabilities=squared
        )

    @property
    def weighs_old(self) -> bool:
        return self.bounds_importance or self.ratio_to == "sampler"

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """All groups; or, with dynamic sampling, the first `wanted` whose scores differ. Where none does, as in a task
        that is solved, the first group stands in for a step that moves nothing."""
        if not self.dynamic_sampling:
            return groups, False
        mixed = [group for group in groups if len({episode.score for episode in group}) > 1]
        return mixed[:wanted] or groups[:1], len(mixed) < wanted

    def advantages(self, batch: Batch) -> Batch:
        self._check_columns(batch)
        lengths = tokens_of_episode(batch.actions, batch.episode)
        score = self.penalised_score(batch)
        if self.overlong:
            assert batch.limit is not None  # see _check_columns
            longest = longest_turns(batch.actions, batch.require("turn"), batch.episode)
            score = score + group_advantages.overlong_penalty(longest, batch.limit, self.overlong).to(score.dtype)
        if self.baseline == "token":
            credits = self._credit_of_tokens(batch, score)
        else:
            credits = batch.per_token(self._credit(batch, score, lengths))
        if self.turn_coefficient:
            of_turns = self.turn_coefficient * self._credit_of_turns(batch).to(credits.dtype)
            credits = self.episode_coefficient * credits + of_turns
        if self.mask_truncated:
            batch = batch.replace(actions=batch.actions & batch.terminated[:, None])
        return batch.replace(advantages=credits * batch.actions)

    def _credit(self, batch: Batch, score: Float[Tensor, " N"], lengths: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The advantage of each row's answer."""
        episode, group = batch.episode, batch.group
        if self.normalise_parts:
            components = batch.require("reward_components")
            parts = torch.tensor(batch.component_weights, dtype=components.dtype, device=components.device)
            return gdpo_advantages(components, parts, episode, group)
        if self.pass_at is not None:
            return group_advantages.pass_at_k(score, episode, group, self.pass_at)
        if self.scale_rewards == "mean":
            _check_not_negative(score)
            return group_advantages.mean_scaled(score, episode, group)
        if self.baseline == "length":
            found = group_advantages.length_weighted(score, lengths, episode, group)
        elif self.keep is not None:
            order = lengths if self.keep_by == "length" else -score / lengths.clamp(min=1)
            kept = group_advantages.ranks_in_group(order, episode, group) < self.keep
            found = torch.zeros_like(score)
            found[kept] = credit.group_centred(score[kept], episode[kept], group[kept], self.scale_rewards)
        else:
            found = credit.group_centred(score, episode, group, self.scale_rewards)
        return found * group_advantages.mixed_scale(score, episode, group) if self.scale_by_mixed else found

    def _credit_of_tokens(self, batch: Batch, score: Float[Tensor, " N"]) -> Float[Tensor, "N T"]:
        """The advantage of each token, whose baseline is its own."""
        said, squared = batch.require("logprobs_old"), batch.require("squared_probabilities")
        squares = token_baseline.squared_logit_gradient(said, squared).to(score.dtype)
        found = token_baseline.optimal_token_advantages(score, squares, batch.actions, batch.episode, batch.group)
        scale = group_advantages.mixed_scale(score, batch.episode, batch.group) if self.scale_by_mixed else 1.0
        return found * scale

    def _credit_of_turns(self, batch: Batch) -> Float[Tensor, "N T"]:
        """The advantage of each turn among those of its group that answered the same text."""
        turn, actions = batch.require("turn"), batch.actions
        returns = turn_returns(batch.rewards, actions, turn, batch.episode, self.turn_gamma)
        return turn_group_advantages(
            returns, batch.tokens, actions, turn, batch.episode, batch.group, batch.source,
            scaled=self.scale_rewards == "group", history=self.turn_history, power=self.turn_history_power,
        )  # fmt: skip

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        weight, metrics = self._importance(batch, new)
        batch = batch.replace(logprobs_old=self._denominator(batch))
        difference = losses.log_ratio(new.logprobs, batch.require("logprobs_old"))
        policy, measured = policy_term(self, batch, new, difference)
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

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """The same loss, where tokens are chosen by a look at all of the step's."""
        actions, old = batch.actions, self._denominator(batch)
        chosen = chosen_tokens(self, batch, new, old)
        penalised = self.covariance == "penalise"
        trains = torch.ones_like(actions) if penalised else ~chosen if self.covariance == "clip" else chosen
        terms, metrics = self.loss(batch.replace(advantages=batch.require("advantages") * trains), new)
        if penalised:
            change = losses.log_ratio(new.logprobs, old).abs()
            terms["covariance"] = (self.covariance_coefficient * change * chosen, self.reduction)
        total, episode_tokens = totals(actions, batch.episode), tokens_of_episode(actions, batch.episode)
        reduced = {
            name: (weights(how, actions, episode_tokens, total) * term).sum() for name, (term, how) in terms.items()
        }
        means = {name: float(masked_mean(value.detach(), actions)) for name, value in metrics.items()}
        return reduced, means | {"tokens/chosen": float(masked_mean(chosen.double(), actions))}

    @property
    def whole_batch(self) -> bool:
        written = type(self).batch_loss is not GRPO.batch_loss  # by a subclass
        return written or self.top_entropy < 1 or self.covariance != "none"

    def _denominator(self, batch: Batch) -> Float[Tensor, "N T"]:
        """The log-probabilities below the ratio's bar."""
        return batch.require("logprobs_sampler" if self.ratio_to == "sampler" else "logprobs_old")

    def _importance(self, batch: Batch, new: PolicyOutputs) -> tuple[Tensor | float, dict[str, Tensor]]:
        """What the policy's term of each token weighs for the difference of sampler and trainer, and its metrics."""
        weight: Tensor | float = 1.0
        if not self.reads_sampler:
            return weight, {}
        old, sampler = batch.require("logprobs_old"), batch.require("logprobs_sampler")
        metrics = {}
        if self.bounds_importance:
            weight, beyond = importance.importance_weight(
                old, sampler, batch.actions, self.importance_level,
                self.importance_floor, self.importance_cap, self.importance_outside,
            )  # fmt: skip
            metrics["importance/capped"] = beyond.to(old.dtype)
        left_out = torch.zeros_like(batch.actions)
        if self.mismatch_bound is not None:
            left_out = left_out | importance.mismatched_rows(old, sampler, batch.actions, self.mismatch_bound)
        if self.off_policy_threshold is not None:
            left_out = left_out | importance.off_policy_rows(
                new.logprobs, sampler, batch.require("advantages"), batch.actions, self.off_policy_threshold
            )
        if self.mismatch_bound is not None or self.off_policy_threshold is not None:
            weight = weight * ~left_out
            metrics["importance/left_out"] = left_out.to(old.dtype)
        return weight, {"importance/mean": torch.as_tensor(weight), **metrics}

    def _check_columns(self, batch: Batch) -> None:
        """Raise LmgymError where the batch lacks what a field asks for; the trainer's own batches have it."""
        if batch.logprobs_sampler is None and (self.reads_sampler or self.ratio_to == "sampler"):
            raise LmgymError(
                "algorithm.importance_cap, importance_floor, mismatch_bound, off_policy_threshold and ratio_to: "
                "sampler need the sampler's log-probabilities, and some turn of this batch has none"
            )
        if (self.length_norm or self.overlong) and batch.limit is None:
            key = "length_norm" if self.length_norm else "overlong"
            raise LmgymError(f"algorithm.{key} needs the token limit of an answer; give collate(limit=...)")
        if self.normalise_parts and batch.reward_components is None:
            raise LmgymError("algorithm.normalise_parts needs the parts of the score; give collate(weights=...)")


def _check_not_negative(score: Float[Tensor, " N"]) -> None:
    """Raise LmgymError where a group's mean is no measure of how much it has earned."""
    if bool((score < 0).any()):
        raise LmgymError(
            f"algorithm.scale_rewards is mean, and an answer's score is {float(score.min()):.4g}; only scores of 0 or "
            "more can be divided by their mean, so shift the reward, or write scale_rewards: group"
        )


for preset in PRESETS:  # names that mean grpo with the preset of that name
    if preset != "paper":
        register("algorithm", preset)(GRPO)
