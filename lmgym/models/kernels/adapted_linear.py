"""Linear layers with adapters in bf16 on a CPU: W x + s B (A x), where the second product is added to the first one.

peft's own layer multiplies B (A x) by s, adds it, and turns its input into fp32 and back; with their gradients these
passes over memory take longer than the two small products. Here only x and A x are kept for backward, in bf16; of the
frozen W neither a gradient nor a copy in bf16. Only the `forward` of the layers changes, and only under autocast, so
that whoever asks in fp32 gets peft's."""

from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmgym.models import lora


def use_in(model: nn.Module) -> None:
    """Give the adapted linear layers of a model, and of all copies of it, these products."""
    for layer in model.modules():
        if lora.is_plain(layer) and lora.adapter_of(layer) is not None:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


class AdaptedLinear(torch.autograd.Function):
    """apply(hidden [... I], W [O I], bias [O] or None, A [K I], B [O K], s) -> [... O]: W x + bias + s B (A x).

    W and bias are frozen, in any precision; the rest has the precision of `hidden`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "*R I"],
        weight: Float[Tensor, "O I"],
        bias: Float[Tensor, " O"] | None,
        down: Float[Tensor, "K I"],
        up: Float[Tensor, "O K"],
        scale: float,
    ) -> Float[Tensor, "*R O"]:
        rows = hidden.reshape(-1, hidden.shape[-1])
        low = rows @ down.T
        out = nn.functional.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
        out.addmm_(low, up.T, alpha=scale)
        ctx.save_for_backward(rows, weight, down, up, low)
        ctx.scale = scale
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, low = ctx.saved_tensors
        by_rows = by_output.reshape(-1, by_output.shape[-1])
        by_low = (by_rows @ up).mul_(ctx.scale)
        by_up = (low.T @ by_rows).T.mul_(
            ctx.scale
        )  # oneDNN copies its first matrix if that is transposed: the small one
        by_hidden = None
        if ctx.needs_input_grad[0]:
            by_hidden = (by_rows @ weight.to(rows.dtype)).addmm_(by_low, down).view(*by_output.shape[:-1], -1)
        return by_hidden, None, None, by_low.T @ rows, by_up, None


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    device = hidden.device.type
    if layer.disable_adapters or not torch.is_autocast_enabled(device):
        return type(layer).forward(layer, hidden)  # type: ignore[no-any-return]
    hidden, base = hidden.to(torch.get_autocast_dtype(device)), lora.base_of(layer)
    first, second, scale = layer.lora_A[lora.NAME], layer.lora_B[lora.NAME], layer.scaling[lora.NAME]
    if torch.is_grad_enabled():
        down, up = (part.weight.to(hidden.dtype) for part in (first, second))
        return AdaptedLinear.apply(hidden, base.weight, base.bias, down, up, scale)  # type: ignore[no-any-return, no-untyped-call]
    out: Tensor = base(hidden)  # whose weights may be laid out, as A's may
    out.flatten(0, -2).addmm_(first(hidden).flatten(0, -2), second.weight.to(hidden.dtype).T, alpha=scale)
    return out
