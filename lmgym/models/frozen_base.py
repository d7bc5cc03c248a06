"""The frozen weights below adapters, held in bf16 where that loses nothing: published models lie on bf16's grid.

Then they are in memory once, for scoring, training and sampling, in half the bytes; a pass in bf16 turns nothing into
bf16 first, and hidden states between layers are bf16 as they are in the sampler. Where weights are not on the grid they
stay fp32, and passes round them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lmgym.models.quantization import is_quantised


@torch.no_grad()
def hold_narrow(model: nn.Module) -> None:
    """Turn the frozen parameters of a model into bf16, if each of their numbers is one of bf16."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if all(p.dtype == torch.float32 and bool((p == p.bfloat16()).all()) for p in frozen):
        for parameter in frozen:
            parameter.data = parameter.data.bfloat16()


def hold_wide(model: nn.Module) -> None:
    """Turn them back into fp32, for good."""
    for parameter in _narrow(model):
        parameter.data = parameter.data.float()


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Within this context they are fp32, like the adapters."""
    held = [(parameter, parameter.data) for parameter in _narrow(model)]
    hold_wide(model)
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def _narrow(model: nn.Module) -> list[nn.Parameter]:
    """Frozen parameters in bf16 of a model of which others train in fp32, and that is not quantized."""
    parameters = [] if is_quantised(model) else list(model.parameters())
    if not any(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in parameters):
        return []
    return [parameter for parameter in parameters if not parameter.requires_grad and parameter.dtype == torch.bfloat16]
