"""Supervised fine-tuning on the references: a warm start, in the same loop as everything else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.registry import register


@register("algorithm", "supervised")
@dataclass(kw_only=True)
class Supervised(Algorithm):
    """loss = -mean over tokens of log pi(reference token); the prompt is not trained on, the end of sequence is.

    It is REINFORCE on demonstrations with an advantage of 1 for every token."""

    turns: Literal["last", "all"] = "last"
    """all: the assistant's messages in a prompt are trained on too, each with its end; a conversation is one row."""

    @property
    def requirements(self) -> Requirements:
        return Requirements(answers="references", every_turn=self.turns == "all")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages=batch.actions.float())

    def loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Terms, Mapping[str, Tensor]]:
        return {"policy": (-new.logprobs, "token")}, {}
