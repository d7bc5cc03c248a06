"""From a batch to a changed policy: `prepare` fills the columns, `first_order` takes one optimizer step.

Nothing here knows an algorithm or a model by name; both are called through their contracts
(algorithms/base.py, policies/policy.py).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lmgym.batch import Batch
from lmgym.errors import LmgymError
from lmgym.maths.reductions import Totals, masked_mean, tokens_of_episode, totals, weights


@dataclass(kw_only=True)
class OptimizerSection:
    """The `optimizer:` section of a recipe: AdamW (arXiv 1711.05101) and the learning rate as a function of the step.

    Example: OptimizerSection(learning_rate=1e-6, schedule="cosine", warmup=20)
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    """On matrices only, not on biases and norms."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this L2 norm; 0 switches it off (the norm is logged all the same)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 5
    """Steps over which the learning rate rises linearly from 1/warmup of itself."""
    final_fraction: float = 0.0
    """Where linear and cosine schedules end, as a fraction of learning_rate."""

    def at(self, step: int, steps: int) -> float:
        """The learning rate of a step (counted from 0) of a stage of `steps`.

        A pure function, so a resumed run needs no scheduler state. Resuming with more steps continues on the curve
        of the longer stage: nothing changes for `constant`, while `linear` and `cosine` jump to where the longer
        curve stands at that step.

        Example:
            >>> [OptimizerSection(learning_rate=1.0, warmup=2, schedule="linear").at(s, 4) for s in range(4)]
            [0.5, 1.0, 1.0, 0.5]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = min((step - self.warmup) / max(steps - self.warmup, 1), 1.0)
        falling = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * falling[self.schedule])


class Optimizer:
    """AdamW over a policy's parameters, its learning rate set per step, with clipping of the gradient norm."""

    def __init__(self, parameters: list[torch.nn.Parameter], section: OptimizerSection) -> None:
        self.section = section
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.parameters = parameters
        self.torch = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.epsilon,
            fused=parameters[0].device.type in ("cpu", "cuda"),
        )

    def set_step(self, step: int, steps: int) -> float:
        """Set the learning rate of this training step, and return it."""
        rate = self.section.at(step, steps)
        for group in self.torch.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        """Gradients to zero rather than to None: a step without any signal is still a step (momentum, decay)."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def step(self) -> float:
        """Clip, move the parameters, and return the gradient's L2 norm before clipping.

        Raises LmgymError, with the parameters untouched, if the gradient is not finite.
        """
        limit = self.section.max_gradient_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        if not math.isfinite(norm):
            raise LmgymError(
                "the gradient is not finite, so the policy was left as it was; lower optimizer.learning_rate, "
                "or look at the last rollouts for a reward that explodes"
            )
        self.torch.step()
        return norm


def prepare(batch: Batch, policy: Any, reference: Any, algorithm: Any) -> Batch:
    """Fill the columns that the algorithm needs, then its advantages.

    `logprobs_old` costs a scoring pass and is needed only where a batch serves more than one optimizer step: on the
    first step the old policy is the new one. `logprobs_ref` is computed once per batch, and only where there is a
    reference.
    """
    if algorithm.optimizer_steps > 1 or "old" in algorithm.needs:
        batch = batch.with_(logprobs_old=policy.logprobs(batch))
    if "reference" in algorithm.needs:
        batch = batch.with_(logprobs_ref=reference.logprobs(batch))
    return algorithm.advantages(batch)


def first_order(algorithm: Any, policy: Any, batch: Batch, optimizer: Optimizer, first: bool) -> dict[str, float]:
    """One optimizer step on all rows of this batch; returns its metrics.

    The weights of the tokens come from totals over the whole batch, so the cut into micro-batches does not matter.
    Rows that cannot contribute (`Algorithm.active`) are counted in the totals but not computed. On the first step of a
    batch `logprobs_old` is what the policy says now, so the ratio is exactly 1.
    """
    total = totals(batch.actions, batch.episode)
    episode_tokens = tokens_of_episode(batch.actions, batch.episode)
    active = algorithm.active(batch)
    optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    for rows in policy.micro_batches(batch[active]) if bool(active.any()) else []:
        rows = active.nonzero()[:, 0][rows]
        for name, value in _micro_batch(algorithm, policy, batch[rows], episode_tokens[rows], total, first).items():
            sums[name] = sums[name] + value if name in sums else value
    norm = optimizer.step()
    tokens = max(float(sums.pop("tokens", torch.tensor(0.0))), 1.0)
    metrics = {name: float(value) / (1.0 if name.startswith("loss/") else tokens) for name, value in sums.items()}
    return {**metrics, "gradient_norm": norm, "rows/computed": float(active.float().mean())}


def _micro_batch(
    algorithm: Any, policy: Any, batch: Batch, episode_tokens: Tensor, total: Totals, first: bool
) -> dict[str, Tensor]:
    """Accumulate the gradient of some rows; returns sums over their tokens, to be divided by "tokens"."""
    batch = batch.to(policy.device)
    wide = torch.float32 if policy.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    episode_tokens = episode_tokens.to(policy.device, wide)
    new = policy.score(batch, entropy="entropy" in algorithm.needs)
    if first:
        batch = batch.with_(logprobs_old=new.logprobs.detach())
    terms, metrics = algorithm.loss(batch, new)
    losses = {
        f"loss/{name}": (weights(reduction, batch.actions, episode_tokens, total) * term).sum()
        for name, (term, reduction) in terms.items()
    }
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        sums = {name: (value.detach() * batch.actions).sum().to(wide) for name, value in metrics.items()}
        sums["tokens"] = batch.actions.sum().to(wide)
        if new.entropy is not None:
            sums["entropy"] = new.entropy.detach().sum().to(wide)
        if first and batch.logprobs_sampler is not None:
            gap = (new.logprobs.detach() - batch.logprobs_sampler).abs() * batch.actions
            sums["mismatch/mean"] = gap.sum().to(wide)
    return sums | {name: loss.detach() for name, loss in losses.items()}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What can be said of a prepared batch without a forward pass.

    `entropy` is the Monte-Carlo estimate -mean(log-probability of the sampled tokens): unbiased, free of cost (the
    exact one replaces it where the algorithm asks for entropies).
    """
    metrics = {"advantage/std": float(batch.advantages[batch.actions].std()) if batch.advantages is not None else 0.0}
    if batch.logprobs_sampler is not None:
        metrics["entropy"] = -float(masked_mean(batch.logprobs_sampler, batch.actions))
    if batch.logprobs_ref is not None and batch.logprobs_sampler is not None:
        metrics["kl/reference"] = float(masked_mean(batch.logprobs_sampler - batch.logprobs_ref, batch.actions))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
