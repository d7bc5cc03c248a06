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


class FusedLogprobs(torch.autograd.Function):
    """apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, entropy, chunk, logprob_gradient [R] or
    None) -> the log-probability of each target [R], and the entropy of each distribution [R] (empty unless asked for).
    `logprob_gradient` is what the gradient by the log-probabilities will be; it does not go with `entropy`.

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
        logprob_gradient: Float[Tensor, " R"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        head, wide = weight.to(hidden.dtype), _wide(hidden.dtype)
        normaliser, picked, disorder = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(3))
        gradient = None if logprob_gradient is None else _Gradient(ctx, hidden, weight)
        room = hidden.new_empty(min(chunk, len(hidden)), len(head))
        for rows in _slices(0, len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=room[: rows.stop - rows.start])
            for part in _slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                adjusted = _adjusted(logits, rows, part, bias, adjust, wide)
                normaliser[part] = adjusted.logsumexp(-1)
                picked[part] = adjusted.gather(1, targets[part, None])[:, 0]
                if entropy:
                    chance = (adjusted - normaliser[part, None]).exp()
                    disorder[part] = normaliser[part] - _expected(chance, adjusted)
                if logprob_gradient is not None:
                    surprise = adjusted.sub_(normaliser[part, None])
                    of_logits = _of_logits(surprise, scale * logprob_gradient[part, None], targets[part, None])
                    _put(of_logits, logits, rows, part)
            if gradient is not None:
                gradient.add(logits, rows)
        kept = (None, None) if gradient is None else gradient.both
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, disorder, logprob_gradient, *kept)
        ctx.settings = adjust, scale, entropy, chunk
        return picked - normaliser, disorder if entropy else disorder[:0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, disorder, logprob_gradient, *kept = ctx.saved_tensors
        if logprob_gradient is not None and torch.equal(logprob_gradient, by_logprob):
            return *kept, *[None] * 7
        adjust, scale, entropy, chunk = ctx.settings
        head, wide = weight.to(hidden.dtype), _wide(hidden.dtype)
        gradient = _Gradient(ctx, hidden, weight)
        room = hidden.new_empty(min(chunk, len(hidden)), len(head))
        for rows in _slices(0, len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=room[: rows.stop - rows.start])
            for part in _slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                share = scale * by_logprob[part, None]
                surprise = _adjusted(logits, rows, part, bias, adjust, wide).sub_(normaliser[part, None])  # log p
                if entropy:  # dH/da = -p (log p + H)
                    chance = surprise.exp()
                    surprise.masked_fill_(chance == 0, 0.0).add_(disorder[part, None])
                    of_logits = chance.mul_(surprise.mul_(scale * by_entropy[part, None]).add_(share)).neg_()
                    of_logits.scatter_add_(1, targets[part, None], share)
                else:
                    of_logits = _of_logits(surprise, share, targets[part, None])
                _put(of_logits, logits, rows, part)
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


def _of_logits(surprise: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    """d log p(target) / d logits, times `share` [R 1], from log p [R V], in its place."""
    return surprise.exp_().mul_(-share).scatter_add_(1, targets, share)


def _put(of_logits: Tensor, logits: Tensor, rows: slice, part: slice) -> None:
    """In place of the logits, where they have not been formed there: a copy onto itself is a pass over both."""
    tile = logits[part.start - rows.start : part.stop - rows.start]
    if tile.data_ptr() != of_logits.data_ptr():
        tile.copy_(of_logits)


def _adjusted(
    logits: Tensor, rows: slice, part: slice, bias: Tensor | None, adjust: Adjust, wide: torch.dtype
) -> Tensor:
    tile = logits[part.start - rows.start : part.stop - rows.start].to(wide)
    return adjust(tile if bias is None else tile + bias, part)


def _expected(chance: Tensor, adjusted: Tensor) -> Tensor:
    """Excluded tokens stand at -inf; 0 * -inf would be NaN."""
    return (chance * adjusted.masked_fill(chance == 0, 0.0)).sum(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(place, min(place + size, stop)) for place in range(start, stop, size)]
