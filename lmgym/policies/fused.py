"""The LM head, the softmax and the pick of the sampled token in one pass each way, so that no [R V] outlives a chunk.

Backward computes a chunk's logits again, turns them into their own gradient in place, and multiplies that once into the
hidden states' gradient and once into the weights'. Where the caller knows beforehand what the gradient by each
log-probability will be, forward does all that with the logits it has, which saves one product of four and an
exponential; backward then only sees that the promise was kept, to the last bit, and else does its own work.

Elementwise work goes in tiles that stay in the processor's cache, and all chunks share one buffer: fresh pages from the
system cost as much as the arithmetic. Autograd over the same chunks does 1.4 (fp32) to 2.4 times (bf16) as much on a
CPU, and holds more.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2**20  # numbers per elementwise pass

# From the model's logits of some rows (a slice of all R) to those of the distributions that were sampled.
Adjust = Callable[[Tensor, slice], Tensor]


class Described(torch.autograd.Function):
    """apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, entropy, chunk, promised [R] or
    None) -> the log-probability of each target [R], and the entropy of each distribution [R] (empty unless asked for).
    `promised` is what the gradient by the log-probabilities will be; it does not go with `entropy`.

    `adjust` may divide by a temperature, whose inverse is `scale`, and put -inf in places; nothing else. The product
    with the head runs in the precision of `hidden`, the rest in at least fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "R H"],
        weight: Float[Tensor, "V H"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, " R"],
        adjust: Adjust,
        scale: float,
        entropy: bool,
        chunk: int,
        promised: Float[Tensor, " R"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        head, wide = weight.to(hidden.dtype), _wide(hidden.dtype)
        highest, total, picked, disorder = (hidden.new_zeros(len(hidden), 1, dtype=wide) for _ in range(4))
        gradient = None if promised is None else _Gradient(ctx, hidden, weight)
        room = hidden.new_empty(min(chunk, len(hidden)), len(head))
        for rows in _slices(0, len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=room[: rows.stop - rows.start])
            for part in _slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                tile = logits[part.start - rows.start : part.stop - rows.start]
                adjusted = _adjusted(tile, part, bias, adjust, wide)
                picked[part] = adjusted.gather(1, targets[part, None])
                highest[part] = adjusted.amax(-1, keepdim=True)
                kept = adjusted.clone() if entropy else None
                mass = adjusted.sub_(highest[part]).exp_()
                total[part] = mass.sum(-1, keepdim=True)
                if kept is not None:
                    disorder[part] = highest[part] + total[part].log() - _expected(mass, kept) / total[part]
                if promised is not None:
                    _of_logits(mass, total[part], scale * promised[part, None], targets[part, None], tile)
            if gradient is not None:
                gradient.add(logits, rows)
        formed = (None, None) if gradient is None else gradient.both
        ctx.save_for_backward(hidden, weight, bias, targets, highest, total, disorder, promised, *formed)
        ctx.settings = adjust, scale, entropy, chunk
        logprobs = picked - (highest + total.log())
        return logprobs[:, 0], disorder[:, 0] if entropy else disorder[:0, 0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, highest, total, disorder, promised, *formed = ctx.saved_tensors
        if promised is not None and torch.equal(promised, by_logprob):
            return *formed, *[None] * 7
        adjust, scale, entropy, chunk = ctx.settings
        head, wide = weight.to(hidden.dtype), _wide(hidden.dtype)
        gradient = _Gradient(ctx, hidden, weight)
        room = hidden.new_empty(min(chunk, len(hidden)), len(head))
        for rows in _slices(0, len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=room[: rows.stop - rows.start])
            for part in _slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                tile, share = logits[part.start - rows.start : part.stop - rows.start], scale * by_logprob[part, None]
                adjusted = _adjusted(tile, part, bias, adjust, wide).sub_(highest[part])
                if not entropy:
                    _of_logits(adjusted.exp_(), total[part], share, targets[part, None], tile)
                    continue
                surprise = adjusted.sub_(total[part].log())  # log p
                chance = surprise.exp()
                surprise.masked_fill_(chance == 0, 0.0).add_(disorder[part])
                # dH/da = -p (log p + H)
                of_logits = chance.mul_(surprise.mul_(scale * by_entropy[part, None]).add_(share)).neg_()
                tile.copy_(of_logits.scatter_add_(1, targets[part, None], share))
            gradient.add(logits, rows)
        return *gradient.both, *[None] * 7


class _Gradient:
    """The gradients of hidden states and head, summed up chunk by chunk from those of the logits."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.head, self.wide = hidden, weight.to(hidden.dtype), _wide(hidden.dtype)
        self.of_hidden, self.dtype = torch.empty_like(hidden), weight.dtype
        trains = ctx.needs_input_grad[1]  # not under LoRA
        self.of_weight = torch.zeros(weight.shape, dtype=self.wide, device=weight.device) if trains else None

    def add(self, of_logits: Tensor, rows: slice) -> None:
        torch.mm(of_logits, self.head, out=self.of_hidden[rows])
        if self.of_weight is not None and self.hidden.dtype == self.wide:
            self.of_weight.addmm_(of_logits.T, self.hidden[rows])
        elif self.of_weight is not None:
            self.of_weight += of_logits.T @ self.hidden[rows]

    @property
    def both(self) -> tuple[Tensor, Tensor | None]:
        return self.of_hidden, None if self.of_weight is None else self.of_weight.to(self.dtype)


def _of_logits(mass: Tensor, total: Tensor, share: Tensor, targets: Tensor, out: Tensor) -> None:
    """d log p(target) / d logits, times `share` [R 1], from mass [R V], which is p times `total` [R 1]; destroys it."""
    torch.mul(mass.scatter_add_(1, targets, -total), -share / total, out=out)


def _adjusted(tile: Tensor, part: slice, bias: Tensor | None, adjust: Adjust, wide: torch.dtype) -> Tensor:
    """The distributions' logits; where nothing had to be changed, the tile itself."""
    tile = tile.to(wide)
    return adjust(tile if bias is None else tile + bias, part)


def _expected(mass: Tensor, adjusted: Tensor) -> Tensor:
    """Excluded tokens stand at -inf; 0 * -inf would be NaN."""
    return (mass * adjusted.masked_fill_(mass == 0, 0.0)).sum(-1, keepdim=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(place, min(place + size, stop)) for place in range(start, stop, size)]
