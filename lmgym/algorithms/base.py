"""The contract of an algorithm: a dataclass of its hyperparameters and a few short methods.

The trainer knows only what is here. `advantages` and `loss` are the algorithm; the rest has defaults. An algorithm
never sees a string, a model or a tokenizer: columns of a `Batch` come in, per-token terms go out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.functional.reductions import Reduction
from lmgym.types import Episode, Restriction
from lmgym.updates.first_order import Optimizer, first_order

Terms = dict[str, tuple[Tensor, Reduction]]  # name -> (per-token term [N T], how it is averaged)


@dataclass(kw_only=True)
class Algorithm:
    """What every algorithm has. Fields are its section of a recipe.

    Example: the whole of REINFORCE without a baseline:
        >>> @dataclass(kw_only=True)
        ... class Plain(Algorithm):
        ...     def advantages(self, batch):
        ...         return batch.replace(advantages=batch.per_token(batch.score))
        ...     def loss(self, batch, new):
        ...         return {"policy": (-batch.advantages * new.logprobs, "constant")}, {}
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of the fields under a name: `algorithm: {name: ppo, preset: trl}`."""

    group_size: int = 1
    """Answers per prompt."""
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Optimizer steps per pass (at most one per group)."""
    progress: float = field(default=0.0, init=False, repr=False)
    """Share of the stage's steps that lie behind; the trainer sets it before each step, for schedules."""

    def __post_init__(self) -> None:
        for name in ("group_size", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise LmgymError(f"algorithm.{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def requirements(self) -> Requirements:
        """What to collect and fill in besides the answers; a subclass extends it by `dataclasses.replace`."""
        return Requirements()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that one batch serves."""
        return self.epochs * self.minibatches

    def parameters(self, policy: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """What the optimizer moves: the policy's own parameters, and its critic's."""
        return policy.parameters(), policy.critic_parameters()

    def restriction(self, mask: Any) -> Restriction | None:
        """Which tokens may be sampled in training; `mask` is the frozen copy that `requirements.mask` asks for, else None."""
        return None

    def check_vocabulary(self, size: int) -> None:
        """Raise LmgymError where the fields do not go with a vocabulary of `size`; called before a model is loaded."""

    def select(self, groups: list[list[Episode]], wanted: int) -> tuple[list[list[Episode]], bool]:
        """The groups that train, and whether to draw more prompts for this step (up to the stage's `max_draws`).

        `groups` are all those drawn in this step so far, `wanted` is the recipe's `prompts_per_step`. A group may be
        cut to some of its episodes, and groups of earlier steps may be added (replay). Default: all, no. Rewards and
        lengths are logged of all drawn episodes, whatever is selected.
        """
        return groups, False

    def before_scoring(self, batch: Batch) -> Batch:
        """The batch as its log-probabilities are to be taken, all of them; called before any column is filled in."""
        return batch

    def advantages(self, batch: Batch) -> Batch:
        """The batch with `advantages` [N T] (and `returns`, for a critic) filled in: the credit of each token."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        """Named per-token terms to minimise, each with its reduction, and per-token metrics.

        `new` is what the policy says now. The terms of all tokens are weighted and summed by `update.first_order`;
        do not average here. A function of its arguments, which may be asked more than once (update.py's `constant_logprob_gradient`).
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss()")

    def active(self, batch: Batch) -> Bool[Tensor, " N"]:
        """Rows that can move the policy; the others count in the totals but cost no compute."""
        assert batch.advantages is not None
        return (batch.advantages != 0).any(1)

    def update(self, policy: Any, batch: Batch, optimizer: Optimizer) -> dict[str, float]:
        """All optimizer steps on one prepared batch; returns the mean of their metrics."""
        records = []
        for place, minibatch in enumerate(self.minibatches_of(batch)):
            records.append(
                first_order(self, policy, minibatch, optimizer, first=place == 0, refuse=self.should_stop_early)
            )
            if "gradient_norm" not in records[-1]:
                break
        names = {name for record in records for name in record}
        metrics = {name: float(np.mean([r[name] for r in records if name in r])) for name in sorted(names)}
        return metrics | {"updates": float(sum("gradient_norm" in record for record in records))}

    def scheduled(self, final_fraction: float) -> float:
        """A linear schedule's factor at this step: 1 at first, `final_fraction` at the end of the stage."""
        return 1 + (final_fraction - 1) * self.progress

    def should_stop_early(self, metrics: Mapping[str, float]) -> bool:
        """Whether an optimizer step with these metrics is left out, and all after it on the same batch."""
        return False

    def minibatches_of(self, batch: Batch) -> Iterator[Batch]:
        """Each epoch's minibatches, in an order that is a function of the batch's key.

        They are made of whole groups, whose rows share a prompt that is computed once; their numbers of groups differ
        by one at most, and where there are fewer groups than minibatches there are as many minibatches as groups.
        """
        if self.optimizer_steps == 1:
            yield batch
            return
        groups = torch.unique(batch.group)
        for epoch in range(self.epochs):
            order = seeds.permutation(len(groups), batch.key, "minibatches", epoch)
            for chosen in np.array_split(order, min(self.minibatches, len(groups))):
                yield batch[torch.isin(batch.group, groups[torch.from_numpy(chosen)])]

    def after_update(self, run: Any) -> None:
        """Called once per step when the policy has changed: moving baselines, reference refresh, controllers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the fields that a resumed run needs, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
