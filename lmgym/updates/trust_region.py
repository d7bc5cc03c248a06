"""The trust-region driver (TRPO, arXiv 1502.05477): one step of the policy, held to a divergence, then the critic's.

The policy moves along the natural gradient, as far as `delta` allows, by a line search; the optimizer moves the critic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch, States
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted
from lmgym.core.registry import register
from lmgym.functional.losses import ValueClip, log_ratio, value_loss
from lmgym.functional.trust_region import categorical_kl, conjugate_gradient, step_size
from lmgym.updates.checks import checked_rows
from lmgym.updates.first_order import minibatches_of
from lmgym.updates.fisher import FisherProduct, Vector, filled, joined, split
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.protocols import TrainablePolicy, UpdateWatcher
from lmgym.updates.pushes import pushes


@runtime_checkable
class TrustRegionFields(Protocol):
    """What this driver reads of an algorithm: the fields of TRPO."""

    delta: float
    damping: float
    iterations: int
    line_search_steps: int
    line_search_factor: float
    subsample: float
    critic_epochs: int
    critic_minibatches: int
    value_coefficient: float
    value_clip: float | None
    value_clip_form: ValueClip


@register("driver", "trust_region")
def trust_region(
    algorithm: Algorithm,
    policy: TrainablePolicy,
    batch: Batch,
    optimizer: Optimizer,
    watcher: UpdateWatcher | None = None,
) -> dict[str, float]:
    """One step of the policy and the critic's optimizer steps on a prepared batch; returns the metrics of both. The
    `watcher` is shown the log-probabilities that the gradient is taken of, and how it pushes them.

    Raises LmgymError if the algorithm lacks TRPO's fields, which the steps read, or if the gradient is not finite."""
    if not isinstance(algorithm, TrustRegionFields):
        name = type(algorithm).__name__
        raise LmgymError(f"the driver trust_region reads TRPO's fields, and {name} has none; let it extend TRPO")
    batch = batch[checked_rows(algorithm, batch, algorithm.active(batch))]
    return policy_step(algorithm, policy, batch, watcher) | critic_steps(algorithm, policy, batch, optimizer)


trust_region.whole_weights = True  # type: ignore[attr-defined]  # each rank needs all of them


def policy_step(
    algorithm: TrustRegionFields, policy: TrainablePolicy, batch: Batch, watcher: UpdateWatcher | None = None
) -> dict[str, float]:
    """Move the policy's parameters, or leave them exactly as they were; returns what happened. Raises LmgymError, with
    the parameters untouched, if the gradient is not finite."""
    gradient, metrics = surrogate_gradient(policy, batch, watcher)
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
    step, metrics["trpo/residual"] = natural_step(algorithm, policy, batch, gradient / norm)
    return metrics | line_search(algorithm, policy, batch, step)


def natural_step(
    algorithm: TrustRegionFields, policy: TrainablePolicy, batch: Batch, gradient: Vector
) -> tuple[Vector, float]:
    """The full step for a gradient of norm 1, and the norm of the conjugate gradient's residual. The step does not
    depend on the gradient's length; at length 1 the solver's tolerance is a relative one."""
    fisher = FisherProduct(policy, subsampled(batch, algorithm.subsample))

    def product(vector: Vector) -> Vector:
        return fisher(vector) + algorithm.damping * vector

    direction, left = conjugate_gradient(product, gradient, algorithm.iterations)
    return step_size(algorithm.delta, direction @ product(direction)) * direction, float(left)


def line_search(algorithm: TrustRegionFields, policy: TrainablePolicy, batch: Batch, step: Vector) -> dict[str, float]:
    """Take the longest of the shortened steps that improves within the divergence; returns what it was. Without such a
    step the parameters are put back, and nothing is returned."""
    parameters = policy.parameters()
    start = [parameter.detach().clone() for parameter in parameters]
    for power in range(algorithm.line_search_steps):
        scale = algorithm.line_search_factor**power
        with torch.no_grad():
            for parameter, before, part in zip(parameters, start, split(step, parameters), strict=True):
                parameter.copy_(before + scale * part)
        improvement, divergence = compare(policy, batch, start)
        if divergence <= algorithm.delta and improvement > 0:
            taken = {"step_norm": scale * float(step.norm()), "line_search": scale, "improvement": improvement}
            return {f"trpo/{name}": value for name, value in taken.items()} | {"kl/old": divergence, "updates": 1.0}
    with torch.no_grad():
        for parameter, before in zip(parameters, start, strict=True):
            parameter.copy_(before)
    return {}


def subsampled(batch: Batch, share: float) -> Batch:
    """The episodes that the Fisher matrix is of: a choice that depends on the batch's key only."""
    if share == 1:
        return batch
    episodes = torch.unique(batch.episode)
    count = max(round(share * len(episodes)), 1)
    chosen = torch.from_numpy(seeds.permutation(len(episodes), batch.key, "fisher")[:count])
    return batch[torch.isin(batch.episode, episodes[chosen.to(episodes.device)])]


def critic_steps(
    algorithm: TrustRegionFields, policy: TrainablePolicy, batch: Batch, optimizer: Optimizer
) -> dict[str, float]:
    """The optimizer steps of the value function; returns the means of its loss and gradient norm."""
    losses, norms = [], []
    for minibatch in minibatches_of(batch, algorithm.critic_epochs, algorithm.critic_minibatches):
        optimizer.zero_grad()
        weight = algorithm.value_coefficient / int(minibatch.actions.sum())
        losses.append(0.0)
        for rows in counted(policy.micro_batches(minibatch), "updating", "passes"):
            part = minibatch[rows].to(policy.device)
            old, returns = (part.require(name)[part.actions][None] for name in ("values", "returns"))
            values = policy.compute_values(part)[None]
            error = value_loss(values, old, returns, algorithm.value_clip, algorithm.value_clip_form)
            loss = weight * error.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(loss.detach())
        losses[-1] = policy.ranks.totals({"loss": losses[-1]})["loss"]
        norms.append(optimizer.step())
    return {"loss/value": sum(losses) / len(losses), "gradient_norm/critic": sum(norms) / len(norms)}


def surrogate_gradient(
    policy: TrainablePolicy, batch: Batch, watcher: UpdateWatcher | None = None
) -> tuple[Vector, dict[str, float]]:
    """The gradient of the mean over tokens of ratio * A at ratio 1, and the sampler's gap as a metric."""
    parameters, tokens, gap = policy.parameters(), int(batch.actions.sum()), 0.0
    gradient = torch.zeros_like(joined(parameters))
    for rows in policy.micro_batches(batch):
        part = batch[rows].to(policy.device)
        with policy.twice_differentiable():
            logprobs = policy.compute_logprobs(part).logprobs
        mean = (part.require("advantages") * (logprobs - logprobs.detach()).exp() * part.actions).sum() / tokens
        if watcher is not None and watcher.wants(numbers := batch.require("row")[rows]):
            watcher.show(numbers, {"logprobs": logprobs.detach(), **pushes({"policy": -mean}, logprobs)})
        gradient += joined(filled(torch.autograd.grad(mean, parameters, allow_unused=True), parameters))
        if part.logprobs_sampler is not None:
            gap += float(((logprobs.detach() - part.logprobs_sampler).abs() * part.actions).sum())
    policy.ranks.add(gradient)
    gap = policy.ranks.totals({"gap": gap})["gap"]
    return gradient, {} if batch.logprobs_sampler is None else {"sampler_logprob_gap": gap / tokens}


@torch.no_grad()
def compare(policy: TrainablePolicy, batch: Batch, start: Sequence[Tensor]) -> tuple[float, float]:
    """Means over tokens of (ratio - 1) * A and of the exact KL(old || new), old being the policy with the parameters
    `start`. Distributions are held for `head_chunk` tokens at a time."""
    parameters, tokens = policy.parameters(), int(batch.actions.sum())
    improvement = divergence = 0.0
    for rows in policy.micro_batches(batch):
        part = batch[rows].to(policy.device)
        advantages = part.require("advantages")
        row, column = part.actions.nonzero(as_tuple=True)
        with policy.twice_differentiable():
            new = policy.states(part, row, column - 1)
            with exchanged(parameters, start):
                old = policy.states(part, row, column - 1)
        for chunk in torch.split(torch.arange(len(row), device=policy.device), policy.head_chunk):
            at = (part, row[chunk], column[chunk])
            after = policy.action_logits(some(new, chunk), *at)
            with exchanged(parameters, start):
                before = policy.action_logits(some(old, chunk), *at)
            target = part.tokens[row[chunk], column[chunk]][:, None]
            chosen = [logits.log_softmax(-1).gather(1, target) for logits in (after, before)]
            change = log_ratio(chosen[0], chosen[1])[:, 0]
            improvement += float((change.expm1() * advantages[row[chunk], column[chunk]]).sum())
            divergence += float(categorical_kl(before, after).sum())
    sums = policy.ranks.totals({"improvement": improvement, "divergence": divergence})
    return sums["improvement"] / tokens, sums["divergence"] / tokens


def some(states: States, chunk: Tensor) -> States:
    """The states of some tokens."""
    return States(states.hidden[chunk], None if states.logits is None else states.logits[chunk])


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
