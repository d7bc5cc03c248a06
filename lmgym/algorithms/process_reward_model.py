"""A process reward model from labelled steps (arXiv 2305.20050, 2312.08935): how likely each step of an answer is
right."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.functional.preferences import ordered
from lmgym.functional.steps import step_ends, values_after


@register("algorithm", "process_reward_model")
@dataclass(kw_only=True)
class ProcessRewardModel(Algorithm):
    """loss = mean over steps of -log sigmoid(s) for a right step, -log sigmoid(-s) for a wrong one
    s = the value head on the model's state after the last token of the separator that ends the step

    The run's final/ is the model with this head, as transformers' AutoModelForTokenClassification reads it, with the
    labels "wrong" and "right".

    Example: ProcessRewardModel(separator="\\n\\n")"""

    separator: str = "\n"
    """What ends each step, the last one too; no step may hold it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise LmgymError('algorithm.separator is empty; write what ends each step, such as "\\n"')

    @property
    def requirements(self) -> Requirements:
        return Requirements(answers="steps", separator=self.separator, values=True, makes="process_reward_model")

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        logits, right = step_logits(batch, new)
        loss = binary_cross_entropy_with_logits(logits, right.to(logits.dtype))
        margins = (logits.detach() * (2 * right - 1)).double()
        metrics = {"step/accuracy": float(ordered(margins).mean()), "step/right": float(right.double().mean())}
        return {"steps": loss}, metrics


def step_logits(batch: Batch, new: PolicyOutputs) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """The logit of each step of all rows, in their order, and its label: 1 for a right step, 0 for a wrong one. A step
    is a turn, and its label the reward at its last token."""
    ends = step_ends(batch.actions, batch.require("turn"))
    after = values_after(new.require("values"), new.require("last_values"), batch.actions)
    return after[ends], batch.rewards[ends]
