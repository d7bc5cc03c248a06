"""Log-probabilities and entropies straight from hidden states: LM head, softmax and gather in one autograd function.

It works in chunks of rows, so that no logits [R V] outlive a chunk. Backward computes the logits of a chunk again,
turns them into their own gradient in place, and multiplies that with the weights (for the hidden states' gradient) and
with the hidden states (for the weights' gradient).

If the caller knows beforehand the gradient by each log-probability, forward does all of this with the logits it has,
which saves one matrix product of four and an exponential. Backward then only checks that the gradient is bit for bit
the announced one; if it is not, it computes as usual.

Elementwise work is done in tiles that fit the processor's cache, and all chunks share their buffers: fresh memory costs
as much as the arithmetic. In bf16 the exponentials of the softmax are kept for its gradient; fp32 computes them twice,
as it always has. On a CPU, autograd over the same chunks takes 1.4 (fp32) to 2.4 times (bf16) as long.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.models.kernels.onednn_products import add_product, multiply

TILE = 2**20  # numbers per elementwise operation

# From the model's logits of a slice of the R rows to the logits of the distributions that were sampled.
Adjust = Callable[[Tensor, slice], Tensor]


class FusedLogprobs(torch.autograd.Function):
    """Log-probability of each target [R], and the entropy of each distribution [R] (empty unless asked for), in nats.

    apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, entropy, chunk, logprob_gradient,
    onednn)

    `adjust` may divide by a temperature, whose inverse is `scale`, and set logits to -inf; nothing else. `chunk` is the
    number of rows per matrix product. `logprob_gradient` [R] is the gradient by the log-probabilities that backward
    will bring, or None; it cannot be combined with `entropy`. The product with the head runs in the precision of
    `hidden`, the rest in at least fp32. `onednn` takes the products of onednn_products.py, in fp32.

    Example:
        >>> same = lambda logits, rows: logits
        >>> logprobs, _ = FusedLogprobs.apply(hidden, head.weight, None, targets, same, 1.0, False, 64)
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
        onednn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        head, wide = weight.to(hidden.dtype), wide_of(hidden.dtype)
        columns = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(5))
        normaliser, target_logits, entropies, highest, sums = columns
        gradient = None if logprob_gradient is None else HeadGradient(ctx, hidden, weight, head, onednn)
        buffer, once = hidden.new_empty(min(chunk, len(hidden)), len(head)), hidden.dtype != wide and not entropy
        tile = tile_buffer(hidden, head)
        for rows in slices(0, len(hidden), chunk):
            logits = multiply(hidden[rows], head.T, buffer[: rows.stop - rows.start], onednn)
            for part in slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                adjusted = adjust_tile(logits, rows, part, bias, adjust, tile)
                target_logits[part] = adjusted.gather(1, targets[part, None])[:, 0]
                if once:
                    highest[part] = adjusted.amax(-1)
                    exponentials = _exponentials(adjusted, highest[part, None])
                    sums[part] = exponentials.sum(-1)
                    normaliser[part] = highest[part] + sums[part].log()
                    if logprob_gradient is not None:
                        share = scale * logprob_gradient[part, None]
                        by_logits = _scaled_gradient(exponentials, sums[part, None], share, targets[part, None])
                        store_tile(by_logits, logits, rows, part)
                    continue
                normaliser[part] = adjusted.logsumexp(-1)
                if entropy:
                    probs = (adjusted - normaliser[part, None]).exp()
                    entropies[part] = normaliser[part] - _mean_logit(probs, adjusted)
                if logprob_gradient is not None:
                    logprobs = adjusted.sub_(normaliser[part, None])
                    by_logits = logits_gradient(logprobs, scale * logprob_gradient[part, None], targets[part, None])
                    store_tile(by_logits, logits, rows, part)
            if gradient is not None:
                gradient.add(logits, rows)
        finished = (None, None) if gradient is None else gradient.both
        softmax = (normaliser, highest, sums)
        ctx.save_for_backward(hidden, weight, bias, targets, *softmax, entropies, logprob_gradient, *finished)
        ctx.settings = adjust, scale, entropy, chunk, onednn
        return target_logits - normaliser, entropies if entropy else entropies[:0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *softmax, entropies, logprob_gradient, by_hidden, by_weight = ctx.saved_tensors
        normaliser, highest, sums = softmax
        if logprob_gradient is not None and torch.equal(logprob_gradient, by_logprob):
            return by_hidden, by_weight, *[None] * 8
        adjust, scale, entropy, chunk, onednn = ctx.settings
        head, wide = weight.to(hidden.dtype), wide_of(hidden.dtype)
        gradient = HeadGradient(ctx, hidden, weight, head, onednn)
        buffer, once = hidden.new_empty(min(chunk, len(hidden)), len(head)), hidden.dtype != wide and not entropy
        tile = tile_buffer(hidden, head)
        for rows in slices(0, len(hidden), chunk):
            logits = multiply(hidden[rows], head.T, buffer[: rows.stop - rows.start], onednn)
            for part in slices(rows.start, rows.stop, max(TILE // len(head), 1)):
                share = scale * by_logprob[part, None]
                adjusted = adjust_tile(logits, rows, part, bias, adjust, tile)
                if once:
                    exponentials = _exponentials(adjusted, highest[part, None])
                    by_logits = _scaled_gradient(exponentials, sums[part, None], share, targets[part, None])
                    store_tile(by_logits, logits, rows, part)
                    continue
                logprobs = adjusted.sub_(normaliser[part, None])
                if entropy:  # dH/dlogits = -p (log p + H)
                    probs = logprobs.exp()
                    logprobs.masked_fill_(probs == 0, 0.0).add_(entropies[part, None])
                    by_logits = probs.mul_(logprobs.mul_(scale * by_entropy[part, None]).add_(share)).neg_()
                    by_logits.scatter_add_(1, targets[part, None], share)
                else:
                    by_logits = logits_gradient(logprobs, share, targets[part, None])
                store_tile(by_logits, logits, rows, part)
            gradient.add(logits, rows)
        return *gradient.both, *[None] * 8


class HeadGradient:
    """The gradients of hidden states and head, accumulated chunk by chunk from the gradients of the logits."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, head: Tensor, onednn: bool) -> None:
        self.hidden, self.head, self.wide, self.onednn = hidden, head, wide_of(hidden.dtype), onednn
        self.by_hidden, self.dtype = torch.empty_like(hidden), weight.dtype
        trains = ctx.needs_input_grad[1]  # with LoRA the head does not train
        self.by_weight = torch.zeros(weight.shape, dtype=self.wide, device=weight.device) if trains else None
        self.product = torch.empty_like(head) if trains and hidden.dtype != self.wide else None  # of one chunk

    def add(self, by_logits: Tensor, rows: slice) -> None:
        multiply(by_logits, self.head, self.by_hidden[rows], self.onednn)
        if self.by_weight is not None and self.hidden.dtype == self.wide:
            add_product(self.by_weight, by_logits, self.hidden[rows], self.onednn)
        elif self.by_weight is not None:
            torch.mm(by_logits.T, self.hidden[rows], out=self.product)
            assert self.product is not None
            on_cpu = self.head.device.type == "cpu"  # where adding makes a copy in fp32, that of a tile fits the cache
            for part in slices(0, len(self.head), max(TILE // self.head.shape[1], 1) if on_cpu else len(self.head)):
                self.by_weight[part] += self.product[part]

    @property
    def both(self) -> tuple[Tensor, Tensor | None]:
        return self.by_hidden, None if self.by_weight is None else self.by_weight.to(self.dtype)


def logits_gradient(logprobs: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    """`share` [R 1] times d log p(target) / d logits, from log p [R V], which it overwrites."""
    return logprobs.exp_().mul_(-share).scatter_add_(1, targets, share)


def _exponentials(logits: Tensor, highest: Tensor) -> Tensor:
    """exp(logits - highest) [R V], over the logits."""
    return logits.sub_(highest).exp_()


def _scaled_gradient(exponentials: Tensor, sums: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    """`logits_gradient` from the softmax's exponentials and their sums [R 1]; overwrites the exponentials."""
    return exponentials.mul_(-share / sums).scatter_add_(1, targets, share)


def store_tile(by_logits: Tensor, logits: Tensor, rows: slice, part: slice) -> None:
    """Write the gradient over its logits. The copy is skipped if the gradient was computed in place there."""
    tile = logits[part.start - rows.start : part.stop - rows.start]
    if tile.data_ptr() != by_logits.data_ptr():
        tile.copy_(by_logits)


def adjust_tile(
    logits: Tensor, rows: slice, part: slice, bias: Tensor | None, adjust: Adjust, buffer: Tensor | None
) -> Tensor:
    """The logits of the rows `part` within a chunk `rows`, with bias, after `adjust`. They are the chunk's own, or if
    these are in bf16, copies in the buffer."""
    tile = logits[part.start - rows.start : part.stop - rows.start]
    tile = tile if buffer is None else buffer[: len(tile)].copy_(tile)
    return adjust(tile if bias is None else tile + bias, part)


def _mean_logit(probs: Tensor, logits: Tensor) -> Tensor:
    """Sum of p * logit. Excluded tokens have -inf, and 0 * -inf would be NaN."""
    return (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)


def tile_buffer(hidden: Tensor, head: Tensor) -> Tensor | None:
    """A buffer for a tile of logits in fp32; None if they are in fp32 or more anyway."""
    wide = wide_of(hidden.dtype)
    return None if hidden.dtype == wide else hidden.new_empty(max(TILE // len(head), 1), len(head), dtype=wide)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The precision of everything behind the product with the head."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slices(start: int, stop: int, size: int) -> list[slice]:
    """From `start` to `stop` in slices of `size`, the last one perhaps smaller."""
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
