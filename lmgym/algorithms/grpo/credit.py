"""Credit: what each token's advantage is, from the scores of a group of answers to one prompt.

Each class is one way to do it, with its paper. A new one is a class here, or in a file of yours, with
`@register("credit", "its_name")`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch
from lmgym.core.constraints import Coefficient, NonNegativeFloat, Rule, Share
from lmgym.core.errors import LmgymError
from lmgym.core.parts import Part, check_part
from lmgym.core.registry import register
from lmgym.functional import group_advantages, token_baseline
from lmgym.functional.advantages import group_centred, leave_one_out
from lmgym.functional.reductions import tokens_of_episode
from lmgym.functional.shapes import PerRow, PerToken
from lmgym.functional.turn_discounts import turn_returns
from lmgym.functional.turn_groups import turn_group_advantages


@dataclass(frozen=True, kw_only=True)
class Credit(Part):
    """How scores become advantages.

    Example: GroupMean(scale="group").advantages(batch, batch.score)"""

    kind: ClassVar[str] = "credit"
    section: ClassVar[str] = "algorithm.credit"

    of_tokens: ClassVar[bool] = False
    """True if the tokens of one answer may have different advantages."""
    reads_score: ClassVar[bool] = True
    """False if it reads the parts of the scores in their place."""

    @property
    def caution(self) -> str:
        """A sentence to say as a stage begins; "" if there is nothing that one should know."""
        return ""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        """The advantage of each token. `score` is each row's episode score, penalties taken off; what is no action is
        set to zero by the caller."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def with_its_needs(self, required: Requirements) -> Requirements:
        """What an algorithm asks for, and what this credit needs besides."""
        return required

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        """Raise LmgymError where it cannot work with so many answers per prompt, or with scores from which a KL penalty
        or an overlong punishment is taken."""

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """What to log of a prepared batch besides the advantages themselves."""
        return {}


@register("credit", "group")
@dataclass(frozen=True, kw_only=True)
class GroupMean(Credit):
    """R less the mean of the group's scores (Dr. GRPO, arXiv 2503.20783; GRPO, arXiv 2402.03300, section 4.1.2)."""

    scale: Literal["none", "group", "batch"] = "none"
    """Divide by the standard deviation of the group's scores, or of the batch's, + 1e-4."""
    scale_by_mixed: bool = False
    """Multiply by answers / answers in groups whose scores differ (GPG, arXiv 2504.02546)."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        advantages = group_centred(score, batch.episode, batch.group, self.scale)
        return batch.per_token(advantages * mixed_scale(batch, score) if self.scale_by_mixed else advantages)


@register("credit", "leave_one_out")
@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Credit):
    """R less the mean of the group's other scores (RLOO, arXiv 2402.14740, eq. 8)."""

    scale: Literal["none", "others"] = "none"
    """Divide by the standard deviation of the group's other scores + 1e-6, where these differ (NeMo-RL)."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        advantages = leave_one_out(score, batch.episode, batch.group)
        if self.scale == "others":
            advantages = advantages / group_advantages.deviation_of_others(score, batch.episode, batch.group)
        return batch.per_token(advantages)


@register("credit", "mean_scaled")
@dataclass(frozen=True, kw_only=True)
class MeanScaled(Credit):
    """(R - mean) / mean of the group, for scores of 0 or more (MaxRL, arXiv 2602.02710)."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        if bool((score < 0).any()):
            raise LmgymError(
                f"algorithm.credit is mean_scaled, and an answer's score is {float(score.min()):.4g}; only scores of 0 "
                "or more can be divided by their mean, so shift the reward, or write credit: {name: group, scale: "
                "group}"
            )
        return batch.per_token(group_advantages.mean_scaled(score, batch.episode, batch.group))

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        if kl_in_reward or overlong:
            key, instead = ("overlong", "overlong: 0") if overlong else ("kl_in", "kl_in: loss")
            raise LmgymError(
                f"algorithm.credit is mean_scaled, which needs scores of 0 or more, and {key} makes some negative; "
                f"write {instead}"
            )


@register("credit", "length_weighted")
@dataclass(frozen=True, kw_only=True)
class LengthWeighted(Credit):
    """R less the mean of the group's scores weighted by the answers' lengths (OPO, arXiv 2505.23585)."""

    scale_by_mixed: bool = False
    """As in `group`."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        lengths = tokens_of_episode(batch.actions, batch.episode)
        advantages = group_advantages.length_weighted(score, lengths, batch.episode, batch.group)
        return batch.per_token(advantages * mixed_scale(batch, score) if self.scale_by_mixed else advantages)


@register("credit", "token_baseline")
@dataclass(frozen=True, kw_only=True)
class TokenBaseline(Credit):
    """R less, at each token, the mean of the scores weighted by the squared gradients of the answers up to there (the
    optimal token baseline, arXiv 2602.07078)."""

    of_tokens: ClassVar[bool] = True

    scale_by_mixed: bool = False
    """As in `group`."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        logprobs, squared = batch.require("logprobs_old"), batch.distribution_sum("squared_probabilities")
        squares = token_baseline.squared_logit_gradient(logprobs, squared).to(score.dtype)
        advantages = token_baseline.optimal_token_advantages(score, squares, batch.actions, batch.episode, batch.group)
        return advantages * mixed_scale(batch, score) if self.scale_by_mixed else advantages

    def with_its_needs(self, required: Requirements) -> Requirements:
        return replace(required, distribution_sums=(*required.distribution_sums, "squared_probabilities"))


@register("credit", "pass_at_k")
@dataclass(frozen=True, kw_only=True)
class PassAtK(Credit):
    """What an answer adds to the best of k answers of its group (PKPO, arXiv 2505.15201)."""

    k: Annotated[int, Ge(2), Rule("the best of 1 answer is the answer, so it must be at least 2")] = 4

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        return batch.per_token(group_advantages.pass_at_k(score, batch.episode, batch.group, self.k))

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        _check_at_most("k", self.k, group_size, group_size)


@register("credit", "selected")
@dataclass(frozen=True, kw_only=True)
class Selected(Credit):
    """Some answers of each group train: R less their mean; the others have no advantage (GFPO, arXiv 2508.09726)."""

    keep: Annotated[int, Ge(2), Rule("a group's mean needs at least 2 answers")] = 4
    """How many."""
    keep_by: Literal["length", "score_per_token"] = "length"
    """The shortest, or those with the most score for a token."""
    scale: Literal["none", "group", "batch"] = "none"
    """As in `group`, over those that train."""
    scale_by_mixed: bool = False
    """As in `group`."""

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        lengths = tokens_of_episode(batch.actions, batch.episode)
        order = lengths if self.keep_by == "length" else -score / lengths.clamp(min=1)
        kept = group_advantages.ranks_in_group(order, batch.episode, batch.group) < self.keep
        advantages = torch.zeros_like(score)
        advantages[kept] = group_centred(score[kept], batch.episode[kept], batch.group[kept], self.scale)
        return batch.per_token(advantages * mixed_scale(batch, score) if self.scale_by_mixed else advantages)

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        _check_at_most("keep", self.keep, group_size - 1, group_size)


@register("credit", "each_reward")
@dataclass(frozen=True, kw_only=True)
class EachReward(Credit):
    """Each reward scaled within its group, then their weighted sum scaled over the batch (GDPO)."""

    reads_score: ClassVar[bool] = False

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        if batch.reward_components is None:
            raise LmgymError("algorithm.credit: each_reward needs the parts of the score; give collate(weights=...)")
        components = batch.reward_components
        parts = torch.tensor(batch.component_weights, dtype=components.dtype, device=components.device)
        return batch.per_token(group_advantages.gdpo_advantages(components, parts, batch.episode, batch.group))

    def with_its_needs(self, required: Requirements) -> Requirements:
        return replace(required, reward_components=True)

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        if kl_in_reward:
            raise LmgymError(
                "algorithm.credit is each_reward, which scales every reward, so a KL penalty in the reward would lose "
                "its coefficient; write kl_in: loss"
            )
        if overlong:
            raise LmgymError(
                "algorithm.credit is each_reward, which reads the rewards one by one, and overlong changes their sum; "
                "take the reward overlong in its place"
            )


@register("credit", "turns")
@dataclass(frozen=True, kw_only=True)
class Turns(Credit):
    """The episode's advantage, and a turn's return against the group's turns that answered the same text (GiGPO, arXiv
    2505.10978; HGPO, arXiv 2602.22817)."""

    of_tokens: ClassVar[bool] = True

    episode: Credit = GroupMean()
    """What makes the first advantage, of the whole episode's score."""
    episode_coefficient: Coefficient = 1.0
    """Its weight (HGPO: 0)."""
    coefficient: Coefficient = 1.0
    """Weight of the second advantage."""
    scale: Literal["none", "group"] = "none"
    """Divide the second advantage by the deviation of the returns that it is compared with."""
    gamma: Share = 0.95
    """Discount of a turn's return, per turn."""
    history: Annotated[int, Ge(0), Rule("it is a number of turns, 0 or more")] = 0
    """The second advantage is also computed among turns that have answered the same texts so many turns back, and those
    advantages are averaged (HGPO)."""
    history_power: NonNegativeFloat = 1.0
    """An advantage with k earlier turns in common weighs (k + 2) to this power."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part(Credit, self.episode)

    @property
    def caution(self) -> str:
        return self.episode.caution

    def advantages(self, batch: Batch, score: PerRow) -> PerToken:
        of_episode = self.episode.advantages(batch, score)
        turn, actions = batch.require("turn"), batch.actions
        returns = turn_returns(batch.rewards, actions, turn, batch.episode, self.gamma)
        of_turns = turn_group_advantages(
            returns, batch.tokens, actions, turn, batch.episode, batch.group, batch.source,
            scaled=self.scale == "group", history=self.history, power=self.history_power,
        )  # fmt: skip
        return self.episode_coefficient * of_episode + self.coefficient * of_turns.to(of_episode.dtype)

    def with_its_needs(self, required: Requirements) -> Requirements:
        return self.episode.with_its_needs(required)

    def check(self, group_size: int, kl_in_reward: bool, overlong: bool) -> None:
        if kl_in_reward:
            raise LmgymError(
                "algorithm.credit is turns, which reads the rewards of the turns, and a KL penalty in the reward does "
                "not change these; write kl_in: loss"
            )
        self.episode.check(group_size, kl_in_reward, overlong)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return self.episode.metrics(batch)


def mixed_scale(batch: Batch, score: PerRow) -> float | Tensor:
    """Answers over answers in groups whose scores differ."""
    return group_advantages.mixed_scale(score, batch.episode, batch.group)


def _check_at_most(name: str, value: int, most: int, group_size: int) -> None:
    if value > most:
        raise LmgymError(
            f"algorithm.credit.{name} is {value}, and algorithm.group_size is {group_size}; write {most} or less"
        )
