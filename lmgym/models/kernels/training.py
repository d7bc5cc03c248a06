"""training.cpp through ctypes: what layers like Llama's or Gemma's, and the LM head, compute in bf16 on a CPU, forward
and backward.

Matrices in bf16 have their rows filled up to a multiple of 32 (`empty`); what lies there has no meaning. Functions say
how many `rows` count. Other tensors are contiguous and in fp32."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.models.kernels import native
from lmgym.models.kernels.native import FLAG, NUMBER, POINTER, REAL

SOURCE = Path(__file__).with_name("training.cpp")
SIDE = 32  # rows, inputs and outputs of a block
PART = 64  # rows whose gradients of a norm's weights are added up first
SIZES = native.SIZES  # of heads
ARGUMENTS = {
    "use_threads": (NUMBER,),
    "norm": (4 * [POINTER], 2 * [NUMBER], REAL),
    "norm_backward": (9 * [POINTER], 2 * [NUMBER]),
    "gated": (2 * [POINTER], 2 * [NUMBER], FLAG),
    "gated_backward": (4 * [POINTER], 2 * [NUMBER], FLAG),
    "positions": (POINTER, NUMBER, 5 * [POINTER], 4 * [NUMBER], REAL, FLAG),
    "positions_backward": (2 * [POINTER], NUMBER, 5 * [POINTER], 4 * [NUMBER], REAL, FLAG),
    "narrow": (2 * [POINTER], NUMBER),
    "round_randomly": (4 * [POINTER], 2 * [NUMBER]),
    "lay_out_transposed": (2 * [POINTER], 2 * [NUMBER]),
    "lay_out": (2 * [POINTER], 4 * [NUMBER]),
    "product": (7 * [POINTER], 4 * [NUMBER]),
    "weight_gradient": (5 * [POINTER], 3 * [NUMBER]),
    "attend_packed": (POINTER,),
    "attend_packed_backward": (2 * [POINTER],),
    "room": (POINTER,),
    "head_logits": (POINTER,),
    "head_gradient": (POINTER,),
    "room_of_head": (POINTER,),
}


POINTERS = "query_key value out normaliser by_out by_joined starts spans"
NUMBERS = "stride segments rows heads key_heads size"


Low = tuple[Tensor, Tensor]  # the factors of a product of few inputs, of adapters


class PackedAttention(ctypes.Structure):
    """The struct of this name in training_attention.h."""

    _fields_ = [
        *((name, POINTER) for name in POINTERS.split()),
        *((name, NUMBER) for name in NUMBERS.split()),
        ("scale", REAL),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled functions. Raises LmgymError, with a sentence's end, if they cannot be had here."""
    found = native.compiled(SOURCE)
    for name, kinds in ARGUMENTS.items():
        flat = [one for kind in kinds for one in (kind if isinstance(kind, list) else [kind])]
        getattr(found, name).argtypes = flat
    found.room.restype = found.room_of_head.restype = NUMBER
    return found


def may_have_products() -> bool:
    """False where `has_products` would be; known before anything is compiled."""
    return " amx_bf16 " in f"{native.processor()} "


@cache
def has_products() -> bool:
    """True if this processor multiplies in tiles (AMX), and the system lets it."""
    return bool(library().products())


def empty(rows: int, columns: int) -> Float[Tensor, "R_ C"]:
    """A matrix in bf16 with at least so many rows, unwritten."""
    return torch.empty(-(-rows // SIDE) * SIDE, columns, dtype=torch.bfloat16)


def norm(
    hidden: Float[Tensor, "R H"], weight: Float[Tensor, " H"], epsilon: float
) -> tuple[Float[Tensor, "R_ H"], Float[Tensor, " R"]]:
    """The RMS norm of each row (arXiv 1910.07467) in bf16, and what the row was multiplied by."""
    rows, size = hidden.shape
    out, factors = empty(rows, size), torch.empty(rows)
    library().norm(*_places(hidden, weight, out, factors), rows, size, epsilon)
    return out, factors


def norm_backward(
    by_out: Float[Tensor, "R_ H"],
    hidden: Float[Tensor, "R H"],
    factors: Float[Tensor, " R"],
    weight: Float[Tensor, " H"],
    past: Float[Tensor, "R H"],
    narrow: bool,
) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R_ H"] | None, Float[Tensor, "R_ H"], Float[Tensor, " H"]]:
    """The gradient by the hidden states, `past` the norm and through it; the same in bf16, if `narrow`; the norm's
    output again; and the gradient by its weights."""
    rows, size = hidden.shape
    by_hidden, out, parts = torch.empty_like(hidden), empty(rows, size), torch.empty(-(-rows // PART), size)
    in_bf16 = empty(rows, size) if narrow else None
    places = _places(by_out, hidden, factors, weight, past, by_hidden, in_bf16, out, parts)
    library().norm_backward(*places, rows, size)
    return by_hidden, in_bf16, out, parts.sum(0)


def gated(gate_up: Float[Tensor, "R_ 2*I"], rows: int, gelu: bool = False) -> Float[Tensor, "R_ I"]:
    """SiLU of the first half of each row (with `gelu` GELU, by a tanh), times the second half (arXiv 2002.05202)."""
    size = gate_up.shape[1] // 2
    out = empty(rows, size)
    library().gated(*_places(gate_up, out), rows, size, gelu)
    return out


def gated_backward(
    by_out: Float[Tensor, "R_ I"], gate_up: Float[Tensor, "R_ 2*I"], rows: int, gelu: bool = False
) -> tuple[Float[Tensor, "R_ 2*I"], Float[Tensor, "R_ I"]]:
    """The gradient by gate and up, and the output of `gated` again."""
    size = gate_up.shape[1] // 2
    by_gate_up, out = torch.empty_like(gate_up), empty(rows, size)
    library().gated_backward(*_places(by_out, gate_up, by_gate_up, out), rows, size, gelu)
    return by_gate_up, out


def narrowed(wide: Float[Tensor, "R C"]) -> Float[Tensor, "R_ C"]:
    """The numbers in bf16."""
    out = empty(*wide.shape)
    library().narrow(*_places(wide, out), wide.numel())
    return out


def round_randomly(master: Tensor, table: Tensor, windows: Sequence[int], out: Tensor, chunk: int) -> None:
    """`rounding.round_stochastically` of contiguous tensors, bit for bit: each `chunk` numbers of `master` take their
    random integers from the table, from their window on."""
    begins = torch.tensor(windows)
    library().round_randomly(*_places(master, table, begins, out), master.numel(), chunk)


def product(
    hidden: Float[Tensor, "R_ I"],
    weights: Sequence[Float[Tensor, "O I"]],
    rows: int,
    bias: Float[Tensor, " O"] | None = None,
    residual: Float[Tensor, "R O"] | None = None,
    low: Low | None = None,
) -> Tensor:
    """The linear layers with these weights side by side, as one: [R_ O] in bf16. With a `residual` the product, rounded
    to bf16, is added to it, in fp32. `low` [R_ W] and [O W] make another product, which is added before it is rounded.
    """
    outputs, inputs = sum(len(weight) for weight in weights), hidden.shape[1]
    if not _own(inputs, weights):
        out = torch.nn.functional.linear(hidden, torch.cat(list(weights)), bias)
        out = out if low is None else out.addmm_(low[0], low[1].T)
        return out if residual is None else residual + out[:rows]
    laid_out, begin = torch.empty(outputs * inputs, dtype=torch.bfloat16), 0
    for weight in weights:
        library().lay_out_transposed(*_places(weight, laid_out[begin:]), len(weight), inputs)
        begin += weight.numel()
    out = empty(rows, outputs) if residual is None else torch.empty_like(residual)
    others: tuple[Tensor | None, Tensor | None] = (None, None)
    rank = 0
    if low is not None:
        rank, others = low[1].shape[1], (low[0], torch.empty(low[1].numel(), dtype=torch.bfloat16))
        library().lay_out_transposed(*_places(low[1], others[1]), outputs, rank)
    library().product(*_places(hidden, laid_out, bias, residual, out, *others), rows, inputs, outputs, rank)
    return out


def product_back(
    by_out: Float[Tensor, "R_ O"], weights: Sequence[Float[Tensor, "O I"]], rows: int, low: Low | None = None
) -> Float[Tensor, "R_ I"]:
    """The gradient by what `product` was given. `low` [R_ W] and [W I] make another product, which is added."""
    outputs, inputs = by_out.shape[1], weights[0].shape[1]
    if not _own(inputs, weights):
        out = by_out @ torch.cat(list(weights))
        return out if low is None else out.addmm_(*low)
    laid_out, out, first = torch.empty(outputs * inputs, dtype=torch.bfloat16), empty(rows, inputs), 0
    for weight in weights:
        library().lay_out(*_places(weight, laid_out), len(weight), inputs, first, outputs)
        first += len(weight)
    others: tuple[Tensor | None, Tensor | None] = (None, None)
    rank = 0
    if low is not None:
        rank, others = len(low[1]), (low[0], torch.empty(low[1].numel(), dtype=torch.bfloat16))
        library().lay_out(*_places(low[1], others[1]), rank, inputs, 0, rank)
    library().product(*_places(by_out, laid_out, None, None, out, *others), rows, outputs, inputs, rank)
    return out


def weight_gradient(by_out: Float[Tensor, "R_ O"], hidden: Float[Tensor, "R_ I"], rows: int) -> Float[Tensor, "O I"]:
    """The gradient by the weights, in fp32."""
    outputs, inputs = by_out.shape[1], hidden.shape[1]
    if not (has_products() and outputs % SIDE == inputs % SIDE == 0):
        return (by_out[:rows].T @ hidden[:rows]).float()
    out, left, right = torch.empty(outputs, inputs), torch.empty_like(by_out), torch.empty_like(hidden)
    library().weight_gradient(*_places(by_out, hidden, left, right, out), rows, outputs, inputs)
    return out


def _own(inputs: int, weights: Sequence[Tensor]) -> bool:
    return has_products() and inputs % SIDE == 0 and all(len(weight) % SIDE == 0 for weight in weights)


def _places(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
