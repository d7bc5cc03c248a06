"""Linear layers with adapters in bf16 on a CPU: W x + s B (A x), where the second product is added to the first one.

peft's own layer multiplies B (A x) by s, adds it, and turns its input into fp32 and back; with their gradients these
passes over memory take longer than the two small products. Here only x and A x are kept for backward, in bf16; of the
frozen W neither a gradient nor a copy in bf16. Layers with one input compute A x, and the gradients of A and x, in one
product each. Only the `forward` of the layers changes, and only under autocast: who asks in fp32 gets peft's."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmgym.models import lora

ONE_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def use_in(model: nn.Module) -> None:
    """Give the adapted linear layers of a model, and of all copies of it, these products."""
    for module in model.modules():
        own = {name: layer for name, layer in module.named_children() if _is_adapted(layer)}
        groups = [names for names in ONE_INPUT if own.keys() >= {*names}]
        alone = [(name,) for name in own if not any(name in names for names in groups)]
        for names in (*groups, *alone):
            together = Together([own[name] for name in names])
            for place, name in enumerate(names):
                layer: Any = own[name]
                layer.lmgym_place = together, place
                layer.forward = MethodType(_forward, layer)


def _is_adapted(layer: nn.Module) -> bool:
    return lora.is_plain(layer) and lora.adapter_of(layer) is not None


class Together:
    """Layers that are called one after the other with one input: the first call computes all of them."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.given: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}  # of `given`, by the layer's place, until they are asked for

    def output(self, place: int, hidden: Tensor) -> Tensor:
        if hidden is not self.given or place not in self.outputs:
            self.given, self.outputs = hidden, dict(enumerate(products(self.layers, hidden)))
        found = self.outputs.pop(place)
        if not self.outputs:
            self.given = None
        return found


def products(layers: Sequence[Any], hidden: Float[Tensor, "*R I"]) -> Sequence[Float[Tensor, "*R O"]]:
    """What these layers make of one input, in the precision of autocast."""
    hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    base = [lora.base_of(layer) for layer in layers]
    scales = [layer.scaling[lora.NAME] for layer in layers]
    first, second = ([getattr(layer, name)[lora.NAME] for layer in layers] for name in ("lora_A", "lora_B"))
    up = [part.weight.to(hidden.dtype) for part in second]
    if torch.is_grad_enabled():
        down = [part.weight.to(hidden.dtype) for part in first]
        frozen = [(layer.weight, layer.bias) for layer in base]
        return AdaptedLinear.apply(hidden, frozen, scales, *down, *up)  # type: ignore[no-any-return, no-untyped-call]
    outputs = [layer(hidden) for layer in base]  # whose weights may be laid out, as A's may
    for out, low, of_layer, scale in zip(outputs, (part(hidden) for part in first), up, scales, strict=True):
        out.flatten(0, -2).addmm_(low.flatten(0, -2), of_layer.T, alpha=scale)
    return outputs


class AdaptedLinear(torch.autograd.Function):
    """apply(hidden [... I], frozen, scales, *A [K I], *B [O K]) -> W x + bias + s B (A x) [... O] of each layer.

    `frozen` are the pairs of W [O I] and bias [O] (or None), in any precision; the rest has that of `hidden`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "*R I"],
        frozen: Sequence[tuple[Tensor, Tensor | None]],
        scales: Sequence[float],
        *adapters: Tensor,
    ) -> tuple[Float[Tensor, "*R O"], ...]:
        downs, ups = adapters[: len(frozen)], adapters[len(frozen) :]
        rows, down = hidden.reshape(-1, hidden.shape[-1]), torch.cat(downs)
        low, outputs = rows @ down.T, []
        parts = low.split([len(one) for one in downs], 1)
        for (weight, bias), up, part, scale in zip(frozen, ups, parts, scales, strict=True):
            shift = None if bias is None else bias.to(rows.dtype)
            out = nn.functional.linear(rows, weight.to(rows.dtype), shift).addmm_(part, up.T, alpha=scale)
            outputs.append(out.view(*hidden.shape[:-1], -1))
        ctx.save_for_backward(rows, low, *downs, *ups)
        ctx.frozen, ctx.scales = [weight for weight, _ in frozen], scales
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, *adapters = ctx.saved_tensors
        downs, ups = adapters[: len(ctx.frozen)], adapters[len(ctx.frozen) :]
        by_rows = [one.reshape(-1, one.shape[-1]) for one in by_outputs]
        by_low = torch.cat([(one @ up).mul_(scale) for one, up, scale in zip(by_rows, ups, ctx.scales, strict=True)], 1)
        sizes = [len(one) for one in downs]
        by_down = (by_low.T @ rows).split(sizes)
        # oneDNN copies its first matrix if that is transposed: the small one.
        lows = zip(low.split(sizes, 1), by_rows, ctx.scales, strict=True)
        by_up = [(part.T @ one).T.mul_(scale) for part, one, scale in lows]
        by_hidden = None
        if ctx.needs_input_grad[0]:
            by_hidden = by_low @ torch.cat(downs)
            for one, weight in zip(by_rows, ctx.frozen, strict=True):
                by_hidden.addmm_(one, weight.to(rows.dtype))
            by_hidden = by_hidden.view(*by_outputs[0].shape[:-1], -1)
        return by_hidden, None, None, *by_down, *by_up


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    if layer.disable_adapters or not torch.is_autocast_enabled(hidden.device.type):
        return type(layer).forward(layer, hidden)  # type: ignore[no-any-return]
    together, place = layer.lmgym_place
    found: Tensor = together.output(place, hidden)
    return found
