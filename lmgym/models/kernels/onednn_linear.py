"""Linear layers whose bf16 weights lie in memory as oneDNN multiplies them, for sampling on a CPU.

torch's linear layer brings the weights into this order again for each product, which for the few rows of a decoding
step takes longer than the product itself. Here it is done once after each update. One order serves any number of rows,
and the products are those of torch's linear layer bit for bit (`pays` tests it on the machine at hand).

Only the `forward` of the layers changes. It has no gradient."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SMALL = 16**3  # multiplications; torch does no more than so many without oneDNN, and adds in another order
SHAPE, ROWS = (8192, 256), (1, 8, 64)  # of the probe: outputs and inputs, and numbers of rows


def available() -> bool:
    """True if this torch and this processor have the products in bf16."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return can_pack() and supported is not None and bool(supported())


def can_pack() -> bool:
    """True if this torch has the products, in fp32 at least."""
    known = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return torch.backends.mkldnn.is_available() and known


@torch.no_grad()
def pays(repeats: int = 7) -> bool:
    """True if on this machine the products are bit for bit those of torch's linear layer, and faster for a few rows
    (best of `repeats` each, by turns). It takes some ten milliseconds and no generator of random numbers."""
    if not (available() and same_bits()):
        return False
    torchs = ours = 0.0
    for rows in ROWS:
        ways = _two_ways(rows)
        times = [[seconds_of(way) for way in ways] for _ in range(repeats)]
        torchs, ours = torchs + min(one for one, _ in times), ours + min(other for _, other in times)
    return ours < torchs


@torch.no_grad()
def same_bits() -> bool:
    """True if the products of the probe are bit for bit those of torch's linear layer."""
    return all(torch.equal(torchs(), ours()) for torchs, ours in map(_two_ways, ROWS))


def lay_out(model: nn.Module) -> None:
    """Lay out the weights, as they are now, of a model's linear layers in bf16, except tiny ones, where this has not
    been done. It takes as much memory as these weights, until `release`."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D) and "forward" not in vars(layer):
            weight: Tensor = layer.weight  # type: ignore[assignment]
            if weight.dtype == torch.bfloat16 and weight.numel() > SMALL:
                layer.forward = _forward(layer)  # type: ignore[method-assign]


def release(model: nn.Module) -> None:
    """Drop the weights that are laid out: they have changed, or nothing is sampled for a while."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            vars(layer).pop("forward", None)


def pack(weight: Tensor) -> Tensor:
    """Weights [outputs, inputs] in an order of oneDNN's that serves any number of rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]


def product(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """hidden [... inputs] times packed weights, plus the bias: [... outputs]."""
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,assignment]
    packed = pack(weight.T if type(layer) is Conv1D else weight)  # GPT-2's own linear layer stores it as [in, out]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    return lambda hidden: product(hidden, packed, bias)


def _two_ways(rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A product of so many rows by torch's linear layer, and by weights that are laid out."""
    outputs, inputs = SHAPE
    weight = (torch.arange(outputs * inputs) % 251 / 251 - 0.5).view(outputs, inputs).bfloat16()
    hidden = (torch.arange(rows * inputs) % 127 / 127 - 0.5).view(rows, inputs).bfloat16()
    packed = pack(weight)
    return lambda: nn.functional.linear(hidden, weight), lambda: product(hidden, packed, None)


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
