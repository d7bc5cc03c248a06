"""The gradient of a loss that looks at all rows of an optimizer step at once (`Algorithm.batch_loss`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted
from lmgym.functional.reductions import masked_mean
from lmgym.updates.checks import checked_batch_loss, refuse_taken
from lmgym.updates.protocols import TrainablePolicy, UpdateWatcher
from lmgym.updates.pushes import pushes


def whole_batch_gradient(
    algorithm: Algorithm, policy: TrainablePolicy, batch: Batch, first: bool, watcher: UpdateWatcher | None = None
) -> dict[str, float]:
    """Accumulate the gradient of `batch_loss` over all rows, exact for any cut; returns the step's metrics.

    By the chain rule, d loss / d parameters is the sum over tokens of d loss / d logprob * d logprob / d parameters.
    A first pass without gradient says what the loss is a function of (the log-probabilities; entropies and values if
    required), and autograd gives its derivative by each of these numbers. A second pass, micro-batch by micro-batch,
    applies them. On the `first` step of a batch `logprobs_old` is what the policy says now. Costs one forward pass more
    than `loss` does. The `watcher` is shown what the first pass says, and how
    each term pushes it."""
    # 1. What the policy says of all rows: the leaves of the loss.
    required = algorithm.requirements
    if required.divergence is not None:
        raise LmgymError(
            f"{type(algorithm).__name__}: batch_loss gets no divergence from a teacher; write a loss by tokens"
        )
    outputs = policy.compute_logprobs_no_grad(batch, required.values, required.values, required.entropy)
    if first:
        batch = batch.replace(logprobs_old=outputs.logprobs)
    columns = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "values": outputs.values}
    shown = {name: column for name, column in columns.items() if column is not None}
    columns["last_values"] = outputs.last_values
    leaves = {name: column.detach().requires_grad_() for name, column in columns.items() if column is not None}
    # 2. The loss, and its derivative by each number; every rank finds the same.
    losses, metrics = checked_batch_loss(algorithm, algorithm.batch_loss(batch, PolicyOutputs(**leaves)))
    if watcher is not None and watcher.wants(batch.require("row")):
        watcher.show(batch.require("row"), shown | pushes(losses, leaves["logprobs"]))
    total = torch.stack([loss.double().reshape(()) for loss in losses.values()]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
    derivatives = {name: column for name, column in zip(leaves, gradients, strict=False) if column is not None}
    # 3. The second pass, over the rows that have any.
    moved = torch.zeros(len(batch), dtype=torch.bool)
    for column in derivatives.values():
        moved |= (column != 0).reshape(len(batch), -1).any(1)
    numbers = moved.nonzero()[:, 0]
    for rows in counted(policy.micro_batches(batch[moved]) if len(numbers) else [], "updating", "passes"):
        part = batch[numbers[rows]] if len(rows) else batch.idle()
        of_rows = {name: column[numbers[rows] if len(rows) else [0]] for name, column in derivatives.items()}
        _apply(policy, part, of_rows)
    own = {"rows/computed": float(moved.float().mean())} | _metrics(batch, outputs, losses, first)
    refuse_taken(algorithm, metrics, own, "its driver")
    return own | metrics


def _apply(policy: TrainablePolicy, batch: Batch, derivatives: dict[str, Tensor]) -> None:
    """Add to the gradients: each number of a micro-batch times the loss's derivative by it."""
    batch, width = batch.to(policy.device), batch.tokens.shape[1]
    there = {1: batch.actions.any(1), 2: batch.actions}  # an idle row has no actions
    narrow = {name: column if column.dim() == 1 else column[:, :width] for name, column in derivatives.items()}
    derivatives = {name: column.to(policy.device) * there[column.dim()] for name, column in narrow.items()}
    entropy, last = "entropy" in derivatives, "last_values" in derivatives
    known = None
    if not entropy and "logprobs" in derivatives:
        known = derivatives["logprobs"].to(torch.promote_types(policy.compute, torch.float32))
    new = policy.compute_logprobs(batch, entropy, "values" in derivatives or last, last, known)
    terms = [(column.to(new.require(name).dtype) * new.require(name)).sum() for name, column in derivatives.items()]
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def _metrics(batch: Batch, said: PolicyOutputs, losses: Mapping[str, Tensor], first: bool) -> dict[str, float]:
    """The same names as of a loss by tokens."""
    found = {f"loss/{name}": float(loss.detach()) for name, loss in losses.items()}
    if said.entropy is not None:
        found["entropy"] = float(masked_mean(said.entropy.detach(), batch.actions))
    if first and batch.logprobs_sampler is not None:
        gap = (said.logprobs.detach() - batch.logprobs_sampler).abs()
        found["sampler_logprob_gap"] = float(masked_mean(gap, batch.actions))
    return found
