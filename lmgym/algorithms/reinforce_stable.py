"""REINFORCE over turns, with clamped returns, a KL penalty to a reference that follows the policy, and replay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lmgym.algorithms.base import Terms, UpdateContext
from lmgym.algorithms.regularised import Estimator, Regularised, check_group_baseline
from lmgym.algorithms.replay_buffer import Group, ReplayBuffer, check_replay, read_buffer
from lmgym.batch import Batch, PolicyOutputs, numbered_turns
from lmgym.core.constraints import Coefficient, NonNegativeInt, PositiveFloat, PositiveInt, Share
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.losses import log_ratio, policy_gradient
from lmgym.functional.shapes import PerToken
from lmgym.functional.turn_discounts import turn_lengths, turn_means, turn_returns
from lmgym.types import Episode

LEAST_LOGPROB = math.log(1e-10)  # Source: LLM_RL, which clamps probabilities at 1e-10


@register("algorithm", "reinforce_stable")
@dataclass(kw_only=True)
class ReinforceStable(Regularised):
    """REINFORCE with clamped returns and a KL penalty. A step is a turn of the episode, of T tokens.

        G_k  = r_k + gamma G_{k+1}, then cut to [return_low, return_high]         over the turns k
        loss = mean over episodes of the sum over turns of the mean over the turn's tokens t of
               -(G_k - b) log pi(y_t) + (beta / T) (log pi(y_t) - log pi_ref(y_t))^2 / 2

    The KL term's gradient is beta / T (log pi - log pi_ref) grad log pi: that of beta times the turn's mean KL in nats
    per token, so beta is in reward per nat. The reference becomes a copy of the policy every `refresh_every` steps.
    Several optimizer steps on one batch are weighted by the ratio of the policies, which is not clipped.

    With `replayed` each step also trains on single turns of earlier episodes, with the return that they had. Each token
    is then weighted by the ratio to the policy that sampled it, cut to at most `truncate`.

    `compat: llm_rl` is that system's loss, in which the KL estimate is differentiated too and nothing is weighted.
    Source: LLM_RL, ReinforceStable, where a turn is a line of reasoning and there is no baseline.

    Example: {name: reinforce_stable, kl_coefficient: 0.25, refresh_every: 2}
    Example: {name: reinforce_stable, replayed: 4096, minibatches: 128}"""

    gamma: Share = 0.99
    """Discount per turn."""
    return_low: float | None = 0.0
    """Returns below become this, so with 0 there is no negative one; null: no bound."""
    return_high: float | None = 10.0
    baseline: Literal["none", "group", "batch"] = "none"
    """Mean return of the group's or the batch's turns, subtracted from the cut returns."""
    refresh_every: PositiveInt = 2
    """Steps after which the reference becomes a copy of the policy again."""
    kl_coefficient: Coefficient = 0.25
    estimator_in_loss: ClassVar[Estimator] = "k2"
    kl_in: Literal["reward", "loss"] = "loss"
    compat: Literal["none", "llm_rl"] = "none"
    """llm_rl: the loss -u (G - beta (u - v)), u = log pi / T and v = log pi_ref / T, differentiated as it stands."""
    replayed: NonNegativeInt = 0
    """Turns of earlier episodes that each step trains on besides its own (fewer while fewer are kept); 0: no replay."""
    capacity: PositiveInt = 10_000
    """Most turns kept; the oldest groups of episodes go first."""
    max_age: PositiveInt = 8
    """Updates since a group was sampled after which it is dropped."""
    truncate: PositiveFloat = 2.0
    """With replay, the largest weight of a token."""
    load_buffer: str | None = None
    """A file of groups to begin with, which `save_buffer` has written. They count as one update old."""
    save_buffer: str | None = None
    """A file that holds the buffer after each step."""
    buffer: ReplayBuffer = field(default_factory=ReplayBuffer, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.return_low is not None and self.return_high is not None and not self.return_low < self.return_high:
            raise LmgymError(
                f"algorithm.return_low is {self.return_low} and algorithm.return_high {self.return_high}; the first "
                "must be the smaller one"
            )
        check_group_baseline(self.baseline, self.group_size)
        if self.compat == "llm_rl" and (self.baseline != "none" or self.kl_in != "loss" or self.kl_estimator != "k2"):
            raise LmgymError(
                f"algorithm.compat is {self.compat}, whose loss has no baseline and a KL of its own; leave baseline, "
                "kl_in and kl_estimator out"
            )
        if self.replayed:
            self._check_replay()
        elif self.load_buffer or self.save_buffer:
            raise LmgymError("algorithm.load_buffer and save_buffer are for replay; set algorithm.replayed above 0")

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        if self.load_buffer:
            read_buffer(self.load_buffer, size)

    def select(self, groups: list[Group], wanted: int) -> tuple[list[Group], bool]:
        """The fresh groups, then turns of earlier episodes, each as a group of one episode."""
        fresh, more = super().select(groups, wanted)
        if not self.replayed:
            return fresh, more
        old = self.buffer.begin_step(fresh, self.max_age, self.load_buffer)
        turns = [(episode, number) for group in old for episode in group for number in range(count_turns(episode))]
        chosen = self.buffer.draw(len(turns), self.replayed)
        return [*fresh, *([single_turn(*turns[index], self.gamma)] for index in chosen)], more

    def advantages(self, batch: Batch) -> Batch:
        penalty = batch.rewards - self.penalised_rewards(batch)
        returns = self._cut(batch, self._returns(batch, batch.rewards))
        if self.kl_in == "reward":
            returns = returns - self._returns(batch, penalty)
        advantages = returns
        if self.baseline != "none":
            group = batch.group if self.baseline == "group" else torch.zeros_like(batch.group)
            means = turn_means(returns, batch.actions, batch.require("turn"), batch.episode, group)
            advantages = returns - batch.per_token(means)
        lengths = turn_lengths(batch.actions, batch.require("turn"), batch.episode).clamp(min=1)
        return batch.replace(advantages=advantages, returns=returns, turn_lengths=lengths)

    @property
    def formulas(self) -> Mapping[str, str]:
        return {name: text for name, text in super().formulas.items() if name != "kl"}  # the docstring has its own

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        length = batch.require("turn_lengths")
        cut = None
        if self.replayed and self.compat == "none":
            batch, cut = self._weighed_to_the_sampler(batch, new)
        terms = self.regularising_terms(batch, new, "constant")
        if self.compat == "llm_rl":
            terms["policy"] = (self._differentiated_kl_loss(batch, new, length), "constant")
            terms.pop("kl", None)
            return terms, {}
        difference = log_ratio(new.logprobs, batch.require("logprobs_old"))
        ratio = difference.exp()
        # The gradient of -ratio * A, with the value of -A log pi.
        gain = policy_gradient(new.logprobs, batch.require("advantages"))
        terms["policy"] = (ratio.detach() * gain / length, "constant")
        if "kl" in terms:
            terms["kl"] = (terms["kl"][0] / length**2, "constant")
        metrics = {"ratio/mean": ratio, "kl/old": ratio - 1 - difference}
        return terms, metrics if cut is None else {**metrics, "ratio/clipped": cut}

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        whole = self._returns(batch, batch.rewards)
        clamped = (self._cut(batch, whole) != whole)[batch.actions].double().mean()
        return {**super().metrics(batch), "return/clamped": float(clamped)}

    def after_update(self, context: UpdateContext) -> None:
        super().after_update(context)
        if self.requirements.reference and context.step % self.refresh_every == 0:
            context.refresh("reference")
        if self.replayed:
            groups = [*self.buffer.groups, *self.buffer.fresh]
            self.buffer.end_step(newest_groups(groups, self.capacity), context, self.save_buffer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **(self.buffer.state_dict() if self.replayed else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.replayed:
            self.buffer.load_state_dict(state)

    def _returns(self, batch: Batch, rewards: PerToken) -> PerToken:
        return turn_returns(rewards, batch.actions, batch.require("turn"), batch.episode, self.gamma)

    def _cut(self, batch: Batch, returns: PerToken) -> PerToken:
        if self.return_low is None and self.return_high is None:
            return returns
        return returns.clamp(self.return_low, self.return_high) * batch.actions

    def _differentiated_kl_loss(self, batch: Batch, new: PolicyOutputs, length: PerToken) -> PerToken:
        own, advantages = new.logprobs.clamp(min=LEAST_LOGPROB) / length, batch.require("advantages")
        if batch.logprobs_ref is None:
            return -own * advantages
        reference = batch.logprobs_ref.clamp(min=LEAST_LOGPROB) / length
        return -own * (advantages - self.step_beta * (own - reference))

    def _weighed_to_the_sampler(self, batch: Batch, new: PolicyOutputs) -> tuple[Batch, PerToken]:
        """The batch with old log-probabilities whose ratio is min(pi / mu, truncate), and where that was cut."""
        sampler, now = batch.require("logprobs_sampler"), new.logprobs.detach()
        least = now - math.log(self.truncate)
        return batch.replace(logprobs_old=torch.maximum(sampler, least)), (sampler < least).to(now.dtype)

    def _check_replay(self) -> None:
        """Raise LmgymError where a field does not go with replay."""
        check_replay(self.replayed, self.capacity, "turns", self.load_buffer, self.save_buffer)
        if self.baseline == "group" or self.kl_in == "reward":
            key, needs = (
                ("baseline", "the other answers of its group")
                if self.baseline == "group"
                else ("kl_in", "the later turns of its episode")
            )
            raise LmgymError(
                f"algorithm.{key} is {getattr(self, key)}, which needs {needs}, and a replayed turn stands alone; "
                f"leave {key} out, or set replayed to 0"
            )


def count_turns(episode: Episode) -> int:
    """The number of an episode's turns, where turns that continue an unfinished action count as one."""
    return 1 + max((number for _, number in numbered_turns(episode.turns)), default=-1)


def single_turn(episode: Episode, number: int, gamma: float) -> Episode:
    """Turn `number` of an episode alone: all that was before it is its prompt, and its reward is the return from it on.

    Example: of the turns [5] -> [7] (earns 0) and [6] -> [8] (earns 1), the second is [5, 7, 6] -> [8] (earns 1), and
    the first [5] -> [7] (earns gamma)"""
    before, own, later = list[int](), [], dict[int, float]()
    for turn, of in numbered_turns(episode.turns):
        if of == number:
            own.append(turn)
        elif of > number:
            later[of] = later.get(of, 0.0) + turn.reward
        else:
            before = [*([] if turn.restart else before), *turn.prompt_ids, *turn.action_ids]
    ahead = 0.0
    for of in sorted(later, reverse=True):
        ahead = later[of] + gamma * ahead
    before = [] if own[0].restart else before
    own[0] = replace(own[0], prompt_ids=[*before, *own[0].prompt_ids], restart=False)
    own[-1] = replace(own[-1], reward=own[-1].reward + gamma * ahead)
    return replace(episode, turns=own, score=sum(turn.reward for turn in own))


def newest_groups(groups: list[Group], capacity: int) -> list[Group]:
    """The newest groups that have at most `capacity` turns together."""
    turns, first = 0, len(groups)
    while first and (turns := turns + sum(map(count_turns, groups[first - 1]))) <= capacity:
        first -= 1
    return groups[first:]
