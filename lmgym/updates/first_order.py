"""From a batch to a changed policy: `prepare` fills the columns, `first_order` takes one optimizer step.

Nothing here knows an algorithm or a model by name; both are called through their contracts
(algorithms/base.py, models/policy.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.constraints import NonNegativeFloat, NonNegativeInt, ShareBelowOne
from lmgym.core.errors import LmgymError
from lmgym.core.validation import Section
from lmgym.functional import truncation
from lmgym.functional.advantages import deviation, explained_variance
from lmgym.functional.reductions import Totals, masked_mean, tokens_of_episode, totals, weights


@dataclass(kw_only=True)
class OptimizerSection(Section):
    """The `optimizer:` section of a recipe: AdamW (arXiv 1711.05101) or RMSprop, and the learning rate as a function of
    the step.

    Example: OptimizerSection(learning_rate=1e-6, schedule="cosine", warmup=20)
    """

    section = "optimizer"

    name: Literal["adamw", "rmsprop"] = "adamw"
    learning_rate: NonNegativeFloat = 1e-6
    critic_learning_rate: NonNegativeFloat | None = None
    """Of the value function's own parameters; like the policy's if left out. Schedule and warm-up are the same."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """AdamW's."""
    alpha: ShareBelowOne = 0.99
    """RMSprop's memory of squared gradients."""
    epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    """On matrices only, not on biases and norms. AdamW decays the weights themselves, RMSprop adds to the gradient."""
    max_gradient_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this L2 norm; 0 switches it off (the norm is logged all the same)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: NonNegativeInt = 5
    """Steps over which the learning rate rises linearly from 1/warmup of itself."""
    final_fraction: NonNegativeFloat = 0.0
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
    """AdamW or RMSprop over a policy's parameters and its critic's, learning rates set per step, with clipping of the
    gradient norm of all of them together."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        section: OptimizerSection,
        critic: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self.section = section
        self.parameters = [*parameters, *critic]
        own = section.critic_learning_rate
        peaks = (section.learning_rate, section.learning_rate if own is None else own)
        groups = [
            {"params": [p for p in owned if (p.dim() >= 2) == decays], "weight_decay": decay, "peak": peak}
            for owned, peak in zip((parameters, critic), peaks, strict=True)
            for decays, decay in ((True, section.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        if section.name == "rmsprop":
            self.torch: torch.optim.Optimizer = torch.optim.RMSprop(
                groups, lr=section.learning_rate, alpha=section.alpha, eps=section.epsilon
            )
            return
        self.torch = torch.optim.AdamW(
            groups,
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.epsilon,
            fused=self.parameters[0].device.type in ("cpu", "cuda"),
        )

    def set_step(self, step: int, steps: int) -> float:
        """Set the learning rates of this training step, and return the policy's."""
        for group in self.torch.param_groups:
            group["lr"] = replace(self.section, learning_rate=group["peak"]).at(step, steps)
        return self.section.at(step, steps)

    def zero_grad(self) -> None:
        """Gradients to None: the first that comes is kept, not added to zeros."""
        self.torch.zero_grad()

    def step(self) -> float:
        """Clip, move the parameters, and return the gradient's L2 norm before clipping.

        Raises LmgymError, with the parameters untouched, if the gradient is not finite.
        """
        for parameter in self.parameters:
            if parameter.grad is None:  # a step without any signal is still a step (momentum, decay)
                parameter.grad = torch.zeros_like(parameter)
        limit = self.section.max_gradient_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        if not math.isfinite(norm):
            raise LmgymError(
                "the gradient is not finite, so the policy was left as it was; lower optimizer.learning_rate, "
                "or look at the last rollouts for a reward that explodes"
            )
        self.torch.step()
        self.zero_grad()  # they make room for what sampling keeps
        return norm


def prepare(batch: Batch, policy: Any, copies: Mapping[str, Any], algorithm: Any) -> Batch:
    """Fill the columns that the algorithm needs, then its advantages.

    `copies` are the frozen models that it needs, by name: "reference", "teacher". `logprobs_old` costs a scoring pass
    and is needed only where a batch serves more than one optimizer step: on the first step the old policy is the new
    one. The values come from the same pass.
    """
    needs, batch = algorithm.needs, algorithm.before_scoring(batch)
    if algorithm.optimizer_steps > 1 or needs & {"old", "values"}:
        said = policy.describe(batch, values="values" in needs, last_values="values" in needs)
        batch = batch.replace(logprobs_old=said.logprobs, values=said.values, last_values=said.last_values)
    if "reference" in needs:
        batch = batch.replace(logprobs_ref=copies["reference"].logprobs(batch))
    if "teacher" in needs:
        batch = batch.replace(logprobs_teacher=copies["teacher"].logprobs(batch))
    return algorithm.advantages(batch)


def first_order(
    algorithm: Any,
    policy: Any,
    batch: Batch,
    optimizer: Optimizer,
    first: bool,
    refuse: Callable[[dict[str, float]], bool] | None = None,
) -> dict[str, float]:
    """One optimizer step on all rows of this batch; returns its metrics.

    The weights of the tokens come from totals over the whole batch, so the cut into micro-batches does not matter.
    Rows that cannot contribute (`Algorithm.active`) are counted in the totals but not computed. On the first step of a
    batch `logprobs_old` is what the policy says now, so the ratio is exactly 1. Where `refuse` says so of the metrics,
    the parameters are left as they were ("gradient_norm" is then missing).
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
    tokens = max(float(sums.pop("tokens", torch.tensor(0.0))), 1.0)
    metrics = {name: float(value) / (1.0 if name.startswith("loss/") else tokens) for name, value in sums.items()}
    metrics["rows/computed"] = float(active.float().mean())
    if refuse is not None and refuse(metrics):
        return metrics
    return {**metrics, "gradient_norm": optimizer.step()}


def _micro_batch(
    algorithm: Any, policy: Any, batch: Batch, episode_tokens: Tensor, total: Totals, first: bool
) -> dict[str, Tensor]:
    """Accumulate the gradient of some rows; returns sums over their tokens, to be divided by "tokens"."""
    batch = batch.to(policy.device)
    wide = torch.float32 if policy.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    episode_tokens = episode_tokens.to(policy.device, wide)

    def compute_losses(batch: Batch, new: PolicyOutputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        terms, metrics = algorithm.loss(batch, new)
        losses = {
            f"loss/{name}": (weights(reduction, batch.actions, episode_tokens, total) * term).sum()
            for name, (term, reduction) in terms.items()
        }
        return losses, metrics

    entropy, values = "entropy" in algorithm.needs, "values" in algorithm.needs
    logprob_gradient = None
    if first and not entropy:
        logprob_gradient = constant_logprob_gradient(
            batch, compute_losses, values, torch.promote_types(policy.compute, torch.float32)
        )
    new = policy.compute_logprobs(batch, entropy=entropy, values=values, logprob_gradient=logprob_gradient)
    if first:
        batch = batch.replace(logprobs_old=new.logprobs.detach())
    losses, metrics = compute_losses(batch, new)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        sums = {name: (value.detach() * batch.actions).sum().to(wide) for name, value in metrics.items()}
        sums["tokens"] = batch.actions.sum().to(wide)
        if new.entropy is not None:
            sums["entropy"] = new.entropy.detach().sum().to(wide)
        if first and batch.logprobs_sampler is not None:
            gap = (new.logprobs.detach() - batch.logprobs_sampler).abs() * batch.actions
            sums["sampler_logprob_gap"] = gap.sum().to(wide)
    return sums | {name: loss.detach() for name, loss in losses.items()}


def constant_logprob_gradient(
    batch: Batch,
    compute_losses: Callable[[Batch, PolicyOutputs], tuple[dict[str, Tensor], dict[str, Tensor]]],
    values: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """The gradient of a first step's losses by each log-probability [N T], where it is the same whatever the policy
    says: with a ratio of 1 it often is. None where two guesses at what it says come to different gradients."""
    gradients = []
    for guess in (-0.5, -2.0):
        logprobs = torch.full(batch.tokens.shape, guess, dtype=dtype, device=batch.tokens.device, requires_grad=True)
        said = torch.zeros_like(logprobs) if values else None
        losses, _ = compute_losses(
            batch.replace(logprobs_old=logprobs.detach()), PolicyOutputs(logprobs=logprobs, values=said)
        )
        total = torch.stack(list(losses.values())).sum()
        if not total.requires_grad:  # a loss of the values alone
            return None
        gradients.append(torch.autograd.grad(total, logprobs)[0])
    return gradients[0] if torch.equal(*gradients) else None


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What can be said of a prepared batch without a forward pass.

    `entropy` is the Monte-Carlo estimate -mean(log-probability of the sampled tokens): unbiased, free of cost (the
    exact one replaces it where the algorithm asks for entropies).
    """
    metrics = {"advantage/std": 0.0}
    if batch.advantages is not None:
        metrics["advantage/std"] = float(deviation(batch.advantages[batch.actions]))
    if batch.logprobs_sampler is not None:
        metrics["entropy"] = -float(masked_mean(batch.logprobs_sampler, batch.actions))
    if batch.sampling_mask is not None:
        metrics["kept/tokens"] = float(truncation.sizes(batch.sampling_mask.bits).double().mean())
    if batch.logprobs_ref is not None and batch.logprobs_sampler is not None:
        metrics["kl/reference"] = float(masked_mean(batch.logprobs_sampler - batch.logprobs_ref, batch.actions))
    if batch.values is not None and batch.returns is not None:
        metrics["value/mean"] = float(masked_mean(batch.values, batch.actions))
        metrics["value/explained_variance"] = float(explained_variance(batch.values, batch.returns, batch.actions))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
