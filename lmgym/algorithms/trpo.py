"""TRPO: one step of a given divergence along the natural gradient, then regression of the value function."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lmgym.algorithms.actor_critic import ActorCritic
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.fisher import FisherProduct, Vector, filled, joined, split
from lmgym.batch import Batch
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.losses import log_ratio, value_loss
from lmgym.functional.trust_region import categorical_kl, conjugate_gradient, step_size
from lmgym.updates.first_order import Optimizer


@register("algorithm", "trpo")
@dataclass(kw_only=True)
class TRPO(ActorCritic):
    """Trust region policy optimisation (arXiv 1502.05477): how far a step goes is given as a divergence.

        maximise L = mean over tokens of r_t A_t   subject to   mean over tokens of KL(pi_old || pi_new) <= delta
        (F + damping) x = grad L;   step = sqrt(2 delta / x^T (F + damping) x) x, then shortened until both checks hold

    F is the exact Fisher matrix of the tokens' distributions. The optimizer section moves the critic alone.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl4lms": {
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "delta": 0.01,
            "damping": 0.1,
            "iterations": 15,
            "critic_epochs": 10,
            "value_coefficient": 1.0,
        },
    }

    gae_lambda: float = 0.95
    delta: float = 0.01
    """Largest mean KL(old || new) of a step, in nats per token."""
    damping: float = 0.1
    """Added to the Fisher matrix's diagonal."""
    iterations: int = 15
    """Most products with the Fisher matrix in the conjugate gradient."""
    line_search_steps: int = 10
    """Most lengths that are tried."""
    line_search_factor: float = 0.8
    """Each length over the one before it."""
    subsample: float = 1.0
    """Share of the episodes that the Fisher matrix is of; gradient and checks always see all."""
    critic_epochs: int = 10
    """Passes of the critic over each batch; the policy takes one step."""
    critic_minibatches: int = 1
    """The critic's optimizer steps per pass (at most one per group)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("iterations", "line_search_steps", "critic_epochs", "critic_minibatches"):
            if getattr(self, name) < 1:
                raise LmgymError(f"algorithm.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.delta > 0:
            raise LmgymError(f"algorithm.delta is {self.delta}; it must be above 0")
        if not self.damping >= 0:
            raise LmgymError(f"algorithm.damping is {self.damping}; it must be 0 or more")
        if not 0 < self.line_search_factor < 1:
            raise LmgymError(f"algorithm.line_search_factor is {self.line_search_factor}; it must lie between 0 and 1")
        if not 0 < self.subsample <= 1:
            raise LmgymError(f"algorithm.subsample is {self.subsample}; it must be above 0 and at most 1")
        if self.optimizer_steps > 1:
            raise LmgymError(
                "trpo takes one step of the policy per batch: set epochs and minibatches to 1, and critic_epochs and "
                "critic_minibatches for the critic"
            )
        if self.whiten == "minibatch":
            raise LmgymError("algorithm.whiten is minibatch, and trpo has no minibatches; write batch or none")
        if self.entropy_coefficient:
            raise LmgymError("trpo has no entropy bonus; set algorithm.entropy_coefficient to 0")
        if self.kl_in == "loss":
            raise LmgymError("trpo takes the KL to the reference out of the reward; write algorithm.kl_in: reward")

    def parameters(self, policy: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The critic's alone: the policy's step is not the optimizer's."""
        return [], policy.critic_parameters()

    def update(self, policy: Any, batch: Batch, optimizer: Optimizer) -> dict[str, float]:
        batch = batch[self.active(batch)]
        metrics = self.policy_step(policy, batch) | self.critic_steps(policy, batch, optimizer)
        return {**metrics, "kl/coefficient": self.beta} if self.kl_coefficient else metrics

    def policy_step(self, policy: Any, batch: Batch) -> dict[str, float]:
        """Move the policy's parameters, or leave them exactly as they were; returns what happened.

        Raises LmgymError, with the parameters untouched, if the gradient is not finite.
        """
        parameters = policy.parameters()
        gradient, metrics = surrogate_gradient(policy, batch)
        norm = gradient.norm()
        if not bool(torch.isfinite(norm)):
            raise LmgymError(
                "the gradient is not finite, so the policy was left as it was; "
                "look at the last rollouts for a reward that explodes"
            )
        metrics |= {"gradient_norm": float(norm), "updates": 0.0, "kl/old": 0.0}
        metrics |= {f"trpo/{name}": 0.0 for name in ("step_norm", "line_search", "improvement", "residual")}
        if not float(norm):
            return metrics
        step, metrics["trpo/residual"] = self.natural_step(policy, batch, gradient / norm)
        start = [parameter.detach().clone() for parameter in parameters]
        for power in range(self.line_search_steps):
            scale = self.line_search_factor**power
            with torch.no_grad():
                for parameter, before, part in zip(parameters, start, split(step, parameters), strict=True):
                    parameter.copy_(before + scale * part)
            improvement, divergence = compare(policy, batch, start)
            if divergence <= self.delta and improvement > 0:
                taken = {"step_norm": scale * float(step.norm()), "line_search": scale, "improvement": improvement}
                return metrics | {f"trpo/{k}": v for k, v in taken.items()} | {"kl/old": divergence, "updates": 1.0}
        with torch.no_grad():
            for parameter, before in zip(parameters, start, strict=True):
                parameter.copy_(before)
        return metrics

    def natural_step(self, policy: Any, batch: Batch, gradient: Vector) -> tuple[Vector, float]:
        """The full step for a gradient of norm 1, and what the conjugate gradient left over of it.

        The step does not depend on the gradient's length; at length 1 the solver's tolerance is a relative one.
        """
        fisher = FisherProduct(policy, self.subsampled(batch))

        def product(vector: Vector) -> Vector:
            return fisher(vector) + self.damping * vector

        direction, left = conjugate_gradient(product, gradient, self.iterations)
        return step_size(self.delta, direction @ product(direction)) * direction, float(left)

    def subsampled(self, batch: Batch) -> Batch:
        """The episodes that the Fisher matrix is of: a choice that depends on the batch's key only."""
        if self.subsample == 1:
            return batch
        episodes = torch.unique(batch.episode)
        count = max(round(self.subsample * len(episodes)), 1)
        chosen = torch.from_numpy(seeds.permutation(len(episodes), batch.key, "fisher")[:count])
        return batch[torch.isin(batch.episode, episodes[chosen.to(episodes.device)])]

    def critic_steps(self, policy: Any, batch: Batch, optimizer: Optimizer) -> dict[str, float]:
        """The optimizer steps of the value function; returns the means of its loss and gradient norm."""
        losses, norms = [], []
        plan = Algorithm(epochs=self.critic_epochs, minibatches=self.critic_minibatches)
        for minibatch in plan.minibatches_of(batch):
            optimizer.zero_grad()
            weight = self.value_coefficient / int(minibatch.actions.sum())
            losses.append(0.0)
            for rows in policy.micro_batches(minibatch):
                part = minibatch[rows].to(policy.device)
                assert part.values is not None and part.returns is not None
                old, returns = part.values[part.actions][None], part.returns[part.actions][None]
                error = value_loss(values_of(policy, part)[None], old, returns, self.value_clip, self.value_clip_form)
                loss = weight * error.sum()
                loss.backward()  # type: ignore[no-untyped-call]
                losses[-1] += float(loss.detach())
            norms.append(optimizer.step())
        return {"loss/value": sum(losses) / len(losses), "gradient_norm/critic": sum(norms) / len(norms)}


def values_of(policy: Any, batch: Batch) -> Float[Tensor, " R"]:
    """The value of what stands before each action. A head on the policy's own trunk leaves the trunk without gradient:
    regression must not move a policy that has just been held within its trust region."""
    row, column = batch.actions.nonzero(as_tuple=True)
    critic = policy.critic or policy
    with policy.precision(), torch.set_grad_enabled(policy.critic is not None):
        hidden = critic.states(batch, row, column - 1).hidden
    return critic.value_head(hidden.to(critic.value_head.weight.dtype))[:, 0]


def surrogate_gradient(policy: Any, batch: Batch) -> tuple[Vector, dict[str, float]]:
    """The gradient of the mean over tokens of ratio * A at ratio 1, and what is known of the old policy."""
    parameters, tokens, gap = policy.parameters(), int(batch.actions.sum()), 0.0
    gradient = torch.zeros_like(joined(parameters))
    for rows in policy.micro_batches(batch):
        part = batch[rows].to(policy.device)
        with policy.twice_differentiable():
            logprobs = policy.compute_logprobs(part).logprobs
        assert part.advantages is not None
        mean = (part.advantages * (logprobs - logprobs.detach()).exp() * part.actions).sum() / tokens
        gradient += joined(filled(torch.autograd.grad(mean, parameters, allow_unused=True), parameters))
        if part.logprobs_sampler is not None:
            gap += float(((logprobs.detach() - part.logprobs_sampler).abs() * part.actions).sum())
    return gradient, {} if batch.logprobs_sampler is None else {"sampler_logprob_gap": gap / tokens}


@torch.no_grad()
def compare(policy: Any, batch: Batch, start: Sequence[Tensor]) -> tuple[float, float]:
    """Means over tokens of (ratio - 1) * A and of the exact KL(old || new), old being the policy with the parameters
    `start`. Distributions are held for `head_chunk` tokens at a time."""
    parameters, tokens = policy.parameters(), int(batch.actions.sum())
    improvement = divergence = 0.0
    for rows in policy.micro_batches(batch):
        part = batch[rows].to(policy.device)
        assert part.advantages is not None
        row, column = part.actions.nonzero(as_tuple=True)
        with policy.twice_differentiable():
            new = policy.states(part, row, column - 1)
            with exchanged(parameters, start):
                old = policy.states(part, row, column - 1)
        for chunk in torch.arange(len(row), device=policy.device).split(policy.head_chunk):
            at = (part, row[chunk], column[chunk])
            after = policy.action_logits(some(new, chunk), *at)
            with exchanged(parameters, start):
                before = policy.action_logits(some(old, chunk), *at)
            target = part.tokens[row[chunk], column[chunk]][:, None]
            chosen = [logits.log_softmax(-1).gather(1, target) for logits in (after, before)]
            change = log_ratio(chosen[0], chosen[1])[:, 0]
            improvement += float((change.expm1() * part.advantages[row[chunk], column[chunk]]).sum())
            divergence += float(categorical_kl(before, after).sum())
    return improvement / tokens, divergence / tokens


def some(states: Any, chunk: Tensor) -> Any:
    """The states of some tokens."""
    return type(states)(*(None if column is None else column[chunk] for column in states))


@contextmanager
def exchanged(parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Within it the parameters hold other numbers; nothing is copied."""
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, other in zip(parameters, others, strict=True):
            parameter.data = other
        yield
    finally:
        for parameter, numbers in zip(parameters, own, strict=True):
            parameter.data = numbers
