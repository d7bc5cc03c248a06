"""Log-probabilities straight from hidden states, in bf16 on a CPU that multiplies in tiles: fused_logprobs.py through
training_head.h. Logits become their gradient in place, the gradient by the head's weights is a sum in fp32."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.batch import Batch
from lmgym.models.kernels import training
from lmgym.models.kernels.fused_logprobs import slices
from lmgym.models.kernels.native import NUMBER, POINTER, REAL

POINTERS = "hidden weight targets masked mask shares logits room logprobs highest mass target by_hidden by_weight"
NUMBERS = "rows vocabulary size masks"
LEAST_ROWS = 512  # of a chunk: with fewer, reading the head's weights and gradients takes longer than the products


class Head(ctypes.Structure):
    """The struct of this name in training_head.h."""

    _fields_ = [
        *((name, POINTER) for name in POINTERS.split()),
        *((name, NUMBER) for name in NUMBERS.split()),
        ("scale", REAL),
    ]


def serves(hidden: Tensor, weight: Float[Tensor, "V H"], bias: Tensor | None, batch: Batch) -> bool:
    """True if these states and this head are of the kind and size for it, on this processor."""
    plain = hidden.dtype == torch.bfloat16 and weight.dtype in (torch.float32, torch.bfloat16) and bias is None
    sizes = all(number % training.SIDE == 0 for number in weight.shape)
    return plain and sizes and batch.sampling_mask is None and training.has_products()


class FusedHead(torch.autograd.Function):
    """Log-probability of each target [R], in nats.

    apply(hidden [R H] in bf16, weight [V H] in fp32, the same in bf16, targets [R], excluded ids, where they are
    excluded [ids R], scale, chunk, logprob_gradient)

    `scale` is the inverse of the temperature, `chunk` the number of rows at once. `logprob_gradient` [R] is the
    gradient that backward will bring, or None: with it forward does all of the work (fused_logprobs.py)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "R H"],
        weight: Float[Tensor, "V H"],
        computed: Float[Tensor, "V H"],
        targets: Int[Tensor, " R"],
        excluded: Sequence[int],
        mask: Bool[Tensor, "E R"],
        scale: float,
        chunk: int,
        logprob_gradient: Float[Tensor, " R"] | None,
    ) -> Tensor:
        chunks = Chunks(hidden, computed, targets, excluded, mask, scale, chunk)
        known = logprob_gradient is not None and any(ctx.needs_input_grad[:2])
        found = chunks.run(logprob_gradient if known else None, ctx.needs_input_grad[1])
        logprobs, by_hidden, by_weight = found
        ctx.save_for_backward(logprob_gradient if known else None, by_hidden, by_weight)
        ctx.chunks = chunks
        return logprobs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor) -> tuple[Tensor | None, ...]:
        known, by_hidden, by_weight = ctx.saved_tensors
        if known is None or not torch.equal(known, by_logprob):
            _, by_hidden, by_weight = ctx.chunks.run(by_logprob, ctx.needs_input_grad[1])
        return by_hidden, by_weight, *[None] * 7


class Chunks:
    """The rows of hidden states, some at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        excluded: Sequence[int],
        mask: Tensor,
        scale: float,
        chunk: int,
    ) -> None:
        self.hidden, self.weight, self.targets = hidden.detach().contiguous(), weight, targets.contiguous()
        self.excluded, self.mask, self.scale = torch.tensor(list(excluded), dtype=torch.long), mask, scale
        self.chunk = -(-chunk // training.SIDE) * training.SIDE

    def run(self, by_logprobs: Tensor | None, trains: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities [R]; with their gradient, also that by hidden states [R H] in bf16, and by the weights
        [V H] in fp32 if these train."""
        (count, size), vocabulary, library = self.hidden.shape, len(self.weight), training.library()
        rows = min(self.chunk, -(-count // training.SIDE) * training.SIDE)
        logprobs, columns = torch.empty(count), torch.empty(4, rows)
        logits = torch.empty(vocabulary, rows, dtype=torch.bfloat16)
        by_hidden = torch.empty_like(self.hidden) if by_logprobs is not None else None
        by_rows = torch.empty(rows, size)
        by_weight = torch.zeros(vocabulary, size) if by_logprobs is not None and trains else None
        room = None
        for part in slices(0, count, self.chunk):
            states, targets, mask = self.hidden[part], self.targets[part], self.mask[:, part].contiguous()
            shares = None if by_logprobs is None else (self.scale * by_logprobs[part]).float().contiguous()
            tensors: dict[str, Tensor | None] = {"hidden": states, "weight": self.weight, "targets": targets}
            tensors |= {
                "masked": self.excluded,
                "mask": mask,
                "shares": shares,
                "logits": logits,
                "by_hidden": by_rows,
                "by_weight": by_weight,
            }
            tensors |= dict(zip(("logprobs", "highest", "mass", "target"), columns, strict=True))
            asked = Head(
                **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
                rows=len(states),
                vocabulary=vocabulary,
                size=size,
                masks=len(self.excluded),
                scale=self.scale,
            )
            if room is None:
                room = torch.empty(library.room_of_head(ctypes.byref(asked)), dtype=torch.bfloat16)
            asked.room = room.data_ptr()
            library.head_logits(ctypes.byref(asked))
            logprobs[part] = columns[0, : len(states)]
            if by_hidden is not None:
                library.head_gradient(ctypes.byref(asked))
                by_hidden[part] = by_rows[: len(states)]
        return logprobs, by_hidden, by_weight
