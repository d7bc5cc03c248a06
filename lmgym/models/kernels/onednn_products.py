"""Matrix products in fp32 through oneDNN, for processors on which torch's own, which are MKL's, are slower.

MKL takes its slower code on processors that are not Intel's: on an AMD EPYC with AVX-512 it reaches 100 GFLOP/s a core,
and oneDNN, which comes with torch too, 170 to 240. The sums are the same in another order, so the bits are others, and
a recipe must ask for it (`policy.products`).

`use_in` gives a model's linear layers these products, for sampling, scoring and training alike. The fused LM head
(fused_logprobs.py) calls `multiply` and `add_product`. Weights need no layout: oneDNN reads them as they are, also
transposed, as backward has them. A view that leaves out columns would be a hundred times slower, and does not occur."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from lmgym.core.errors import LmgymError
from lmgym.models.kernels.onednn_linear import product, seconds_of

SHAPES = ((512, 288, 768), (64, 512, 4096))  # of the probe: rows, inputs and outputs
PIECE = 2**22  # numbers that a product returns at once: from 2^23 on, glibc takes memory that is fresh each time


def available() -> bool:
    """True if this torch has the products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def check_possible(device: torch.device) -> None:
    """Raise LmgymError if there are no such products on this device."""
    if device.type != "cpu":
        raise LmgymError(f"policy.products: onednn is for a CPU, and the policy is on {device.type}; remove it")
    if not available():
        raise LmgymError("policy.products: this torch was built without oneDNN; write products: torch")


@torch.no_grad()
def speedup(repeats: int = 5) -> float:
    """How many times as fast oneDNN multiplies in fp32 here as torch (best of `repeats` each, by turns; some twenty
    milliseconds)."""
    torchs = ours = 0.0
    for rows, inputs, outputs in SHAPES:
        hidden = (torch.arange(rows * inputs) % 127 / 127 - 0.5).view(rows, inputs)
        weight = (torch.arange(outputs * inputs) % 251 / 251 - 0.5).view(outputs, inputs)
        ways = [partial(way, hidden, weight, None) for way in (nn.functional.linear, product)]
        times = [[seconds_of(way) for way in ways] for _ in range(repeats)]
        torchs, ours = torchs + min(one for one, _ in times), ours + min(other for _, other in times)
    return torchs / ours


def use_in(model: nn.Module) -> None:
    """Give the linear layers of a model, and of all copies of it, these products. Numbers of another precision than
    fp32 are multiplied by torch as before."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]  # a copy's belongs to the copy


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Within this context the model's linear layers have torch's products."""
    layers = [layer for layer in model.modules() if weight_of(layer) is not None]
    for layer in layers:
        del layer.forward  # the method of the class is visible again
    try:
        yield
    finally:
        for layer in layers:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


class OneDNNLinear(torch.autograd.Function):
    """hidden [... I], weight [O I], bias [O] or None: hidden times the transposed weight plus the bias, [... O]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad
        rows, inputs = by_output.reshape(-1, len(weight)), hidden.reshape(-1, hidden.shape[-1])
        by_weight = None
        if of_weight:  # oneDNN copies its first matrix if that is transposed: the smaller one
            larger = rows.shape[1] > inputs.shape[1]
            by_weight = _times(inputs.T, rows).T if larger else _times(rows.T, inputs)
        by_hidden = _times(rows, weight).view(hidden.shape) if of_hidden else None
        return by_hidden, by_weight, rows.sum(0) if of_bias else None


def multiply(
    left: Float[Tensor, "R K"], right: Float[Tensor, "K N"], out: Float[Tensor, "R N"], onednn: bool
) -> Float[Tensor, "R N"]:
    """left times right, written into `out`; through oneDNN or by torch."""
    if not onednn:
        return torch.mm(left, right, out=out)
    size = max(PIECE // right.shape[1], 1)
    for start in range(0, len(left), size):
        out[start : start + size] = _times(left[start : start + size], right)
    return out


def add_product(
    total: Float[Tensor, "N K"], left: Float[Tensor, "R N"], right: Float[Tensor, "R K"], onednn: bool
) -> None:
    """Add the transposed left times right to `total`; through oneDNN or by torch. N is the larger one."""
    if onednn:
        total += _times(right.T, left).T  # oneDNN copies its first matrix if that is transposed
    else:
        total.addmm_(left.T, right)


def _times(left: Tensor, right: Tensor) -> Tensor:
    return product(left, right.T, None)


def weight_of(layer: nn.Module) -> Tensor | None:
    """The weights [O I] of a linear layer that has these products; None if it has not."""
    if type(layer) not in (nn.Linear, Conv1D) or getattr(layer.forward, "__func__", None) is not _forward:
        return None
    return layer.weight.T if type(layer) is Conv1D else layer.weight  # type: ignore[operator,return-value]


def _forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    weight: Tensor = layer.weight.T if type(layer) is Conv1D else layer.weight  # type: ignore[operator,assignment]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if not hidden.dtype == weight.dtype == torch.float32 or hidden.numel() == 0:
        return nn.functional.linear(hidden, weight, bias)
    if torch.is_grad_enabled():
        return OneDNNLinear.apply(hidden, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return product(hidden, weight, bias)
