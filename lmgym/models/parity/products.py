"""Linear layers whose outputs for a row do not depend on the other rows: neither on their number nor on their contents.

A product's kernel, and with it the order of its sums, depends on the number of rows. Here rows are multiplied in tiles
of a few fixed sizes. Which sizes give the same bits, wherever a row stands in a tile, is tried once for each shape of
weights (`sizes_of`). Weights lie in memory as oneDNN multiplies them, laid out once after each update, in one copy for
sampling and scoring; with gradients too. Backward is the usual one."""

from functools import cache
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from lmgym.core.errors import LmgymError
from lmgym.models.kernels import onednn_linear

USUAL = 64  # rows of a tile
SIZES = (1024, 512, 256, 128, USUAL, 32, 16)  # of other tiles, if their bits are the same
MOST = 2**24  # numbers that one product returns


class LaidOut(NamedTuple):
    """Weights laid out, and what they were made of. `source` keeps the memory, so that its address is its name."""

    source: Tensor
    version: int
    precision: torch.dtype
    packed: Tensor


_laid_out: "WeakKeyDictionary[nn.Module, LaidOut]" = WeakKeyDictionary()


def use_in(model: nn.Module) -> None:
    """Give the linear layers of a model, and of all copies of it, these products."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def weights_of(layer: nn.Module, weight: Tensor, precision: torch.dtype) -> Tensor:
    """The weights of a layer, as its products read them: made anew if they have changed (a change in place of
    `weight.data` is not seen, as in rounding.py)."""
    now, found = (weight.data_ptr(), weight._version, precision), _laid_out.get(layer)
    if found is None or (found.source.data_ptr(), found.version, found.precision) != now:
        source = weight.detach()
        rows = source.T if type(layer) is Conv1D else source  # GPT-2's own linear layer stores it as [in, out]
        packed = onednn_linear.pack(rows.to(precision).contiguous())
        found = _laid_out[layer] = LaidOut(source, weight._version, precision, packed)
    return found.packed


def product(hidden: Float[Tensor, "*R I"], packed: Tensor, outputs: int, bias: Tensor | None) -> Float[Tensor, "*R O"]:
    """hidden times weights that are laid out, plus the bias; a row's bits depend on nothing but the row."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    sizes = sizes_of(hidden.shape[-1], outputs, hidden.dtype, torch.get_num_threads())
    found, start = [], 0
    while start < len(rows):
        size = next((size for size in sizes if size <= len(rows) - start), sizes[-1])
        tile = rows[start : start + size]
        if len(tile) < size:
            tile = torch.cat([tile, tile.new_zeros(size - len(tile), tile.shape[1])])
        found.append(onednn_linear.product(tile.contiguous(), packed, bias)[: len(rows) - start])
        start += size
    together = found[0] if len(found) == 1 else torch.cat(found)
    return together.view(*hidden.shape[:-1], outputs)


def of_layer(layer: nn.Linear, weight: Tensor, hidden: Float[Tensor, "*R I"]) -> Float[Tensor, "*R O"]:
    """The product of hidden states, in their precision, with a layer's weights, which may be those shown in its place
    (rounding.py)."""
    return product(hidden, weights_of(layer, weight, hidden.dtype), layer.out_features, None)


@cache
def sizes_of(inputs: int, outputs: int, precision: torch.dtype, threads: int) -> tuple[int, ...]:
    """The sizes of tiles that give the bits of a USUAL one, largest first. Raises LmgymError if already in a tile of
    that size the bits depend on the place of a row."""
    generator = torch.Generator().manual_seed(0)
    largest = max(size for size in SIZES if size <= USUAL or size * outputs <= MOST)
    weight = torch.empty(outputs, inputs).uniform_(-1, 1, generator=generator).to(precision)
    hidden = torch.empty(largest, inputs).uniform_(-1, 1, generator=generator).to(precision)
    bias = torch.empty(outputs).uniform_(-1, 1, generator=generator).to(precision)
    packed = onednn_linear.pack(weight)

    def in_tiles(rows: Tensor, size: int) -> Tensor:
        return torch.cat([onednn_linear.product(tile.contiguous(), packed, bias) for tile in rows.split(size)])

    with torch.no_grad():
        expected = in_tiles(hidden, USUAL)

        def same(size: int) -> bool:
            """Whether tiles of this size have the same bits, also where each row has another place."""
            return all(torch.equal(in_tiles(hidden.roll(by, 0), size), expected.roll(by, 0)) for by in (0, 5))

        if not same(USUAL):
            raise LmgymError(
                f"policy.parity: in a product of {inputs} by {outputs} numbers in {str(precision).split('.')[-1]} on "
                "this processor the bits of a row depend on its place among others; remove it"
            )
        return tuple(size for size in SIZES if size <= largest and (size == USUAL or same(size)))


class ExactLinear(torch.autograd.Function):
    """apply(hidden [... I], weight [O I], bias [O] or None, the weights laid out) -> [... O]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden, packed, len(weight), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        rows, inputs = by_output.reshape(-1, len(weight)), hidden.reshape(-1, hidden.shape[-1])
        by_hidden = (rows @ weight).view(hidden.shape) if of_hidden else None
        return by_hidden, rows.T @ inputs if of_weight else None, rows.sum(0) if of_bias else None, None


def forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    """The forward pass of a layer, in the precision of autocast if that is on, else of its weights."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    hidden = hidden.to(precision)
    packed, bias = weights_of(layer, weight, precision), None if bias is None else bias.to(precision)
    if not torch.is_grad_enabled():
        outputs = weight.shape[1] if type(layer) is Conv1D else weight.shape[0]
        return product(hidden, packed, outputs, bias)
    weight = (weight.T if type(layer) is Conv1D else weight).to(precision)
    return ExactLinear.apply(hidden, weight, bias, packed)  # type: ignore[no-any-return, no-untyped-call]
