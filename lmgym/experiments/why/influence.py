"""How much each group of a step moved an answer, to first order: a dot product of gradients for each group.

The change of a log-probability under a small step d of the weights is its gradient times d. Of AdamW's step, what comes
from this batch is

    d = - rate (1 - beta1) / (1 - beta1^t) * g / (sqrt(v / (1 - beta2^t)) + epsilon),

with g the clipped gradient and v the second moment after the step, which is taken as it was: then d is a sum over the
groups. What the moments of earlier steps and weight decay add is given apart. (TracIn, arXiv 2002.08484, has such sums
for SGD.)"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.core.progress import counted
from lmgym.models.policy import Policy
from lmgym.updates.first_order import optimizer_step
from lmgym.updates.optimizer import Optimizer

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Influences:
    """The change of an answer's log-probability, in nats, by groups of a step (by their number), by the `momentum` of
    earlier steps, and by weight `decay`: all to first order. `preconditioned` is False where the optimizer's own
    scaling of the gradient is unknown, and the rate times the plain gradient stands for it.

    Example: Influences({0: 0.02, 1: -0.01}, momentum=0.005, decay=0.0, preconditioned=True).total -> 0.015"""

    groups: Mapping[int, float]
    momentum: float
    decay: float
    preconditioned: bool

    @property
    def total(self) -> float:
        """What the step changes by first order."""
        return sum(self.groups.values()) + self.momentum + self.decay


class GradientsTaken(Optimizer):
    """An optimizer that gives its gradients away where it would step, and leaves the weights as they are.

    Example: optimizer_step(algorithm, policy, batch, GradientsTaken(stage.optimizer, take), first=True)"""

    def __init__(self, optimizer: Optimizer, take: Callable[[Tensors], None]) -> None:
        self.__dict__.update(vars(optimizer))
        self.take = take

    def step(self) -> float:
        self.take([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        self.zero_grad()
        return 0.0


def check_split(algorithm: Algorithm) -> None:
    """Raise LmgymError for an algorithm whose step is no sum over groups, or that trains no policy."""
    if not algorithm.requirements.makes_policy:
        raise LmgymError(f"algorithm: {type(algorithm).__name__} trains a model that scores answers, and gives none")
    if algorithm.driver != Algorithm.driver or algorithm.whole_batch:
        raise LmgymError(
            f"algorithm: the step of {type(algorithm).__name__} is no sum over its groups, so it cannot be split; "
            "`lmgym why` reads steps of algorithms with a loss of tokens and the usual driver, such as grpo"
        )


def active_where(algorithm: Algorithm, keep: Callable[[Tensor], Tensor]) -> Algorithm:
    """A copy of the algorithm whose update computes the rows of those groups alone that `keep` says yes to. The others
    count in the totals, so the parts of a step add up to the whole.

    Example: active_where(algorithm, lambda group: group != 3)     # leaves group 3 out"""
    part = copy.copy(algorithm)
    part.active = lambda batch: algorithm.active(batch) & keep(batch.group)  # type: ignore[method-assign]
    return part


def influences(algorithm: Algorithm, policy: Policy, batch: Batch, optimizer: Optimizer, asked: Batch) -> Influences:
    """How the step on a prepared `batch` moves the answer of `asked` (one row). A batch that serves several optimizer
    steps is taken as one. Gradients of two things are held at a time: the answer's, and one group's.

    Example: influences(stage.algorithm, policy, prepare(batch, ...), stage.optimizer, asked).groups[3] -> 0.012"""
    check_split(algorithm)
    batch = algorithm.before_minibatch(batch)
    answer = _answer_gradient(policy, asked)
    # 1. The whole gradient makes the optimizer's scale.
    whole: list[tuple[list[Tensor], float, float]] = []
    take_whole = GradientsTaken(optimizer, lambda gradients: whole.append(_weighted(optimizer, answer, gradients)))
    optimizer_step(algorithm, policy, batch, take_whole, first=True)
    [(direction, momentum, decay)] = whole
    # 2. Each group's gradient along it.
    groups: dict[int, float] = {}
    for group in counted(torch.unique(batch.group).tolist(), "taking groups one by one", "groups"):
        found = [0.0]
        alone = active_where(algorithm, lambda groups, own=group: groups == own)  # type: ignore[misc]
        if bool(alone.active(batch).any()):
            take = GradientsTaken(optimizer, lambda gradients: found.append(-_dot(direction, gradients)))  # noqa: B023
            optimizer_step(alone, policy, batch, take, first=True)
        groups[group] = found[-1]
    return Influences(groups, momentum, decay, isinstance(optimizer.torch, torch.optim.AdamW))


def _answer_gradient(policy: Policy, asked: Batch) -> list[Tensor]:
    """The gradient of the answer's log-probability by each of the policy's parameters, which come first among the
    optimizer's."""
    parameters = policy.parameters()
    policy.compute_logprobs(asked.to(policy.device)).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _weighted(optimizer: Optimizer, answer: Tensors, gradients: Tensors) -> tuple[list[Tensor], float, float]:
    """The answer's gradient times the optimizer's scale of each weight, and what momentum and decay change."""
    clip = _clip(optimizer, gradients)
    options = {id(p): group for group in optimizer.torch.param_groups for p in group["params"]}
    momentum, decay = 0.0, 0.0
    direction = []
    for parameter, own, gradient in zip(optimizer.parameters, answer, gradients, strict=False):
        group, state = options[id(parameter)], optimizer.torch.state.get(parameter, {})
        rate = group["lr"]
        if not isinstance(optimizer.torch, torch.optim.AdamW):
            direction.append(own * (rate * clip))
            continue
        (beta1, beta2), step = group["betas"], float(state.get("step", 0)) + 1
        second = (gradient * clip).square_().mul_(1 - beta2)
        if "exp_avg_sq" in state:
            second.add_(state["exp_avg_sq"], alpha=beta2)
        scale = own / (second.div_(1 - beta2**step).sqrt_().add_(group["eps"])) * (rate / (1 - beta1**step))
        if "exp_avg" in state:
            momentum -= beta1 * _dot([scale], [state["exp_avg"]])
        decay -= rate * group["weight_decay"] * _dot([own], [parameter.detach()])
        direction.append(scale.mul_((1 - beta1) * clip))
    return direction, momentum, decay


def _clip(optimizer: Optimizer, gradients: Tensors) -> float:
    """By what all gradients are multiplied so that their norm is at most the recipe's."""
    limit = optimizer.section.max_gradient_norm
    norm = float(torch.stack([_wide(gradient).norm() for gradient in gradients]).norm())
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_ has it


def _dot(one: Tensors, other: Tensors) -> float:
    return sum(float((_wide(a) * _wide(b)).sum()) for a, b in zip(one, other, strict=False))


def _wide(tensor: Tensor) -> Tensor:
    """In fp64; on the CPU, if the tensor lies on an Apple GPU, which has no fp64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
