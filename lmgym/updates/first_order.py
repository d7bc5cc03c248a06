"""The first-order driver: epochs of minibatches, and one optimizer step on each of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted
from lmgym.core.registry import register
from lmgym.functional.reductions import Reduction, Totals, tokens_of_episode, totals, weights
from lmgym.updates.checks import checked_batch, checked_loss, checked_rows, refuse_taken
from lmgym.updates.optimizer import Optimizer
from lmgym.updates.protocols import TrainablePolicy, UpdateWatcher
from lmgym.updates.pushes import pushes
from lmgym.updates.whole_batch import whole_batch_gradient


@register("driver", "first_order")
def first_order(
    algorithm: Algorithm,
    policy: TrainablePolicy,
    batch: Batch,
    optimizer: Optimizer,
    watcher: UpdateWatcher | None = None,
) -> dict[str, float]:
    """All optimizer steps on one prepared batch: `algorithm.epochs` passes over its minibatches. The `watcher` is shown
    what each step computes for the rows that it wants.

    Returns the mean of the steps' metrics, and how many `updates` there were: once the algorithm says that it should
    stop early, that step and all after it are left out."""
    records = []
    for index, minibatch in enumerate(minibatches_of(batch, algorithm.epochs, algorithm.minibatches)):
        minibatch = checked_batch(algorithm, "before_minibatch", algorithm.before_minibatch(minibatch))
        records.append(optimizer_step(algorithm, policy, minibatch, optimizer, index == 0, watcher))
        if "gradient_norm" not in records[-1]:
            break
    names = {name for record in records for name in record}
    metrics = {name: float(np.mean([r[name] for r in records if name in r])) for name in sorted(names)}
    return metrics | {"updates": float(sum("gradient_norm" in record for record in records))}


def minibatches_of(batch: Batch, epochs: int, minibatches: int) -> Iterator[Batch]:
    """Each epoch's minibatches, in an order that is a function of the batch's key.

    They are made of whole groups, whose rows share a prompt that is computed once. Their numbers of groups differ by
    one at most, and if there are fewer groups than minibatches there are as many minibatches as groups."""
    if epochs * minibatches == 1:
        yield batch
        return
    groups = torch.unique(batch.group)
    for epoch in range(epochs):
        order = seeds.permutation(len(groups), batch.key, "minibatches", epoch)
        for chosen in np.array_split(order, min(minibatches, len(groups))):
            yield batch[torch.isin(batch.group, groups[torch.from_numpy(chosen)])]


def optimizer_step(
    algorithm: Algorithm,
    policy: TrainablePolicy,
    batch: Batch,
    optimizer: Optimizer,
    first: bool,
    watcher: UpdateWatcher | None = None,
) -> dict[str, float]:
    """One optimizer step on all rows of this minibatch; returns its metrics.

    The weights of the tokens come from totals over the whole minibatch, so neither the cut into micro-batches nor the
    number of ranks matters.
    Rows that cannot contribute (`Algorithm.active`) are counted in the totals but not computed. On the `first` step of
    a batch `logprobs_old` is what the policy says now, so the ratio is exactly 1. If the algorithm should stop early,
    the parameters are left as they were ("gradient_norm" is then missing)."""
    if algorithm.whole_batch:
        optimizer.zero_grad()
        metrics = whole_batch_gradient(algorithm, policy, batch, first, watcher)
        return metrics if algorithm.should_stop_early(metrics) else {**metrics, "gradient_norm": optimizer.step()}
    # What each token weighs follows from the whole minibatch.
    total = totals(batch.actions, batch.episode)
    episode_tokens = tokens_of_episode(batch.actions, batch.episode)
    active = checked_rows(algorithm, batch, algorithm.active(batch))
    # Gradients and sums of metrics add up, micro-batch by micro-batch, over the rows that can contribute.
    optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    for rows in counted(policy.micro_batches(batch[active]) if bool(active.any()) else [], "updating", "passes"):
        rows = active.nonzero()[:, 0][rows]
        part, own_tokens = (batch[rows], episode_tokens[rows]) if len(rows) else (batch.idle(), episode_tokens[:1])
        watching = watcher if len(rows) else None
        for name, value in _micro_batch(algorithm, policy, part, own_tokens, total, first, watching).items():
            sums[name] = sums[name] + value if name in sums else value
    # Losses are weighted sums already; the other sums become means over tokens.
    added = policy.ranks.totals({name: float(value) for name, value in sums.items()})
    tokens = max(added.pop("tokens", 0.0), 1.0)
    metrics = {name: value / (1.0 if name.startswith("loss/") else tokens) for name, value in added.items()}
    metrics["rows/computed"] = float(active.float().mean())
    if algorithm.should_stop_early(metrics):
        return metrics
    return {**metrics, "gradient_norm": optimizer.step()}


def _micro_batch(
    algorithm: Algorithm,
    policy: TrainablePolicy,
    batch: Batch,
    episode_tokens: Tensor,
    total: Totals,
    first: bool,
    watcher: UpdateWatcher | None,
) -> dict[str, Tensor]:
    """Accumulate the gradient of some rows; returns sums over their tokens, to be divided by "tokens"."""
    numbers = batch.require("row") if watcher is not None else None
    batch = batch.to(policy.device)
    wide = torch.float32 if policy.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    episode_tokens = episode_tokens.to(policy.device, wide)

    def weigh(reduction: Reduction) -> Tensor:
        return weights(reduction, batch.actions, episode_tokens, total)

    def add_up(terms: Terms) -> dict[str, Tensor]:
        return {name: (weigh(reduction) * term).sum() for name, (term, reduction) in terms.items()}

    def compute_losses(batch: Batch, new: PolicyOutputs) -> dict[str, Tensor]:
        return add_up(checked_loss(algorithm, batch, algorithm.loss(batch, new))[0])

    # Forward. If the loss's gradient by the log-probabilities is known beforehand, the head's backward is cheaper.
    required = algorithm.requirements
    logprob_gradient = None
    if first and not required.entropy and required.divergence is None:
        logprob_gradient = constant_logprob_gradient(
            batch, compute_losses, required.values, torch.promote_types(policy.compute, torch.float32)
        )
    taught: dict[str, Any] = {} if required.divergence is None else {"divergence": required.divergence}
    new = policy.compute_logprobs(
        batch, entropy=required.entropy, values=required.values, logprob_gradient=logprob_gradient, **taught
    )
    if first:
        batch = batch.replace(logprobs_old=new.logprobs.detach())
    # Backward.
    terms, metrics = checked_loss(algorithm, batch, algorithm.loss(batch, new))
    losses = add_up(terms)
    loss = torch.stack(list(losses.values())).sum()
    if not loss.requires_grad:
        raise LmgymError(
            f"{type(algorithm).__name__}.loss does not depend on what the policy says now; use `new` in it"
        )
    if watcher is not None and numbers is not None and watcher.wants(numbers):
        watcher.show(numbers, _token_columns(batch, new, terms, {**metrics, **pushes(losses, new.logprobs)}, weigh))
    loss.backward()  # type: ignore[no-untyped-call]
    # Sums for the metrics, over this micro-batch's tokens.
    with torch.no_grad():
        sums = {"tokens": batch.actions.sum().to(wide)}
        if new.entropy is not None:
            sums["entropy"] = new.entropy.detach().sum().to(wide)
        if first and batch.logprobs_sampler is not None:
            gap = (new.logprobs.detach() - batch.logprobs_sampler).abs() * batch.actions
            sums["sampler_logprob_gap"] = gap.sum().to(wide)
        sums |= {f"loss/{name}": loss.detach() for name, loss in losses.items()}
        refuse_taken(algorithm, metrics, sums, "its driver")
        return sums | {name: (value.detach() * batch.actions).sum().to(wide) for name, value in metrics.items()}


def _token_columns(
    batch: Batch,
    new: PolicyOutputs,
    terms: Terms,
    others: Mapping[str, Tensor],
    weigh: Callable[[Reduction], Tensor],
) -> dict[str, Tensor]:
    """What a watcher is shown of a pass: columns [N T], among them each term with its weights and `others`."""
    known = {"logprobs": new.logprobs, "advantages": batch.advantages, "entropy": new.entropy}
    columns = {name: column for name, column in known.items() if column is not None}
    for name, (term, reduction) in terms.items():
        columns |= {f"weight/{name}": weigh(reduction), f"loss/{name}": term}
    columns |= others
    return {name: column.detach().broadcast_to(batch.actions.shape) for name, column in columns.items()}


def constant_logprob_gradient(
    batch: Batch, compute_losses: Callable[[Batch, PolicyOutputs], dict[str, Tensor]], values: bool, dtype: torch.dtype
) -> Tensor | None:
    """The gradient of a first step's losses by each log-probability [N T], if it does not depend on them (with a ratio
    of 1 it often does not): None if two guesses at the log-probabilities lead to different gradients."""
    gradients = []
    for guess in (-0.5, -2.0):
        logprobs = torch.full(batch.tokens.shape, guess, dtype=dtype, device=batch.tokens.device, requires_grad=True)
        said = torch.zeros_like(logprobs) if values else None
        losses = compute_losses(
            batch.replace(logprobs_old=logprobs.detach()), PolicyOutputs(logprobs=logprobs, values=said)
        )
        total = torch.stack(list(losses.values())).sum()
        if not total.requires_grad:  # a loss of the values alone
            return None
        gradients.append(torch.autograd.grad(total, logprobs)[0])
    return gradients[0] if torch.equal(*gradients) else None
