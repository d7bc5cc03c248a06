"""Whole copies of a model of which each rank holds a part: they are needed to sample, to keep frozen and to save."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmgym.distributed.parts import is_part, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Skeleton:
    """A sharded model's modules and buffers without its weights, to make whole copies of it."""

    def __init__(self, model: "PreTrainedModel") -> None:
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, {**empty})

    @torch.no_grad()
    def filled(self, model: "PreTrainedModel", precision: torch.dtype | None = None) -> "PreTrainedModel":
        """A whole copy of `model`, put together one parameter after the other; all ranks must ask at once. `precision`
        is that of the copy's parameters (None: the model's)."""
        together = ((whole(p) if is_part(p) else p.clone()).detach() for p in model.parameters())
        return self.with_parameters([tensor.to(precision or tensor.dtype) for tensor in together])

    @torch.no_grad()
    def gathered(self, model: "PreTrainedModel", keep: bool) -> "PreTrainedModel | None":
        """A whole copy in the CPU's memory, on those ranks that `keep` it; all ranks must ask at once."""
        tensors = []
        for parameter in model.parameters():
            together = whole(parameter).detach()
            tensors += [together.cpu()] if keep else []
        return self.with_parameters(tensors) if keep else None

    def with_parameters(self, tensors: Sequence[Tensor]) -> "PreTrainedModel":
        """The model with these parameters."""
        filled: dict[int, Any] = {
            id(ours): nn.Parameter(tensor, ours.requires_grad)
            for ours, tensor in zip(self.model.parameters(), tensors, strict=True)
        }
        return copy.deepcopy(self.model, filled)
