"""Log-probabilities and entropies straight from hidden states: LM head, softmax and gather in one autograd function.

It works in chunks of rows, so that no logits [R V] outlive a chunk. Backward computes the logits of a chunk again,
turns them into their own gradient in place, and multiplies that with the weights (for the hidden states' gradient) and
with the hidden states (for the weights' gradient).

If the caller knows beforehand the gradient by each log-probability, forward does all of this with the logits it has,
which saves one matrix product of four and an exponential. Backward then only checks that the gradient is bit for bit
the announced one; if it is not, it computes as usual.

On a CPU elementwise work is done in tiles that fit its cache, elsewhere in whole chunks. All chunks share their
buffers: fresh memory costs as much as the arithmetic. In bf16 the exponentials of the softmax are kept for its
gradient; fp32 computes them twice, as it always has. On a CPU, autograd over the same chunks takes 1.4 (fp32) to 2.4
times (bf16) as long."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.models.kernels.onednn_products import add_product, multiply

TILE = 2**20  # numbers per elementwise operation on a CPU

# From the model's logits of a slice of the R rows to the logits of the distributions that were sampled.
Adjust = Callable[[Tensor, slice], Tensor]


class FusedLogprobs(torch.autograd.Function):
    """Log-probability of each target [R], and the entropy of each distribution [R] (empty unless asked for), in nats.

    apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, entropy, chunk, logprob_gradient,
    onednn, computed)

    `adjust` may divide by a temperature, whose inverse is `scale`, and set logits to -inf; nothing else. `chunk` is the
    number of rows per matrix product. `logprob_gradient` [R] is the gradient by the log-probabilities that backward
    will bring, or None; it cannot be combined with `entropy`. The product with the head runs in the precision of
    `hidden`, the rest in at least fp32. `onednn` takes the products of onednn_products.py, in fp32."""

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
        computed: Float[Tensor, "V H"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        head, wide = weight.to(hidden.dtype) if computed is None else computed, wide_of(hidden.dtype)
        once = hidden.dtype != wide and not entropy  # the exponentials serve the gradient too
        columns = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(5))
        normaliser, target_logits, entropies, highest, sums = columns
        gradient = None if logprob_gradient is None else HeadGradient(ctx, hidden, weight, head, onednn)
        for tile in tiles(hidden, head, bias, adjust, chunk, onednn):
            part, logits = tile.part, tile.logits
            target_logits[part] = logits.gather(1, targets[part, None])[:, 0]
            if once:
                highest[part] = logits.amax(-1)
                sums[part] = logits.sub_(highest[part, None]).exp_().sum(-1)
                normaliser[part] = highest[part] + sums[part].log()
            else:
                normaliser[part] = logits.logsumexp(-1)
            if entropy:
                probs = (logits - normaliser[part, None]).exp()
                # Excluded tokens have -inf, and 0 * -inf would be NaN.
                entropies[part] = normaliser[part] - (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)
            if gradient is not None and logprob_gradient is not None:
                share = scale * logprob_gradient[part, None]
                if once:
                    by_logits = _scaled_gradient(logits, sums[part, None], share, targets[part, None])
                else:
                    by_logits = logits_gradient(logits.sub_(normaliser[part, None]), share, targets[part, None])
                gradient.add(tile, by_logits)
        finished = (None, None) if gradient is None else gradient.both
        softmax = (normaliser, highest, sums)
        ctx.save_for_backward(hidden, weight, bias, targets, *softmax, entropies, logprob_gradient, *finished)
        ctx.settings = adjust, scale, entropy, chunk, onednn, computed
        return target_logits - normaliser, entropies if entropy else entropies[:0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *softmax, entropies, logprob_gradient, by_hidden, by_weight = ctx.saved_tensors
        normaliser, highest, sums = softmax
        if logprob_gradient is not None and torch.equal(logprob_gradient, by_logprob):
            return by_hidden, by_weight, *[None] * 9
        adjust, scale, entropy, chunk, onednn, computed = ctx.settings
        head = weight.to(hidden.dtype) if computed is None else computed
        gradient = HeadGradient(ctx, hidden, weight, head, onednn)
        for tile in tiles(hidden, head, bias, adjust, chunk, onednn):
            part, logits = tile.part, tile.logits
            share = scale * by_logprob[part, None]
            if entropy:  # dH/dlogits = -p (log p + H)
                logprobs = logits.sub_(normaliser[part, None])
                probs = logprobs.exp()
                logprobs.masked_fill_(probs == 0, 0.0).add_(entropies[part, None])
                by_logits = probs.mul_(logprobs.mul_(scale * by_entropy[part, None]).add_(share)).neg_()
                by_logits.scatter_add_(1, targets[part, None], share)
            elif hidden.dtype != wide_of(hidden.dtype):
                exponentials = logits.sub_(highest[part, None]).exp_()
                by_logits = _scaled_gradient(exponentials, sums[part, None], share, targets[part, None])
            else:
                by_logits = logits_gradient(logits.sub_(normaliser[part, None]), share, targets[part, None])
            gradient.add(tile, by_logits)
        return *gradient.both, *[None] * 9


class Tile(NamedTuple):
    """Some rows (`part`) of a chunk of them (`rows`): their logits, adjusted, and the head's own ones of the chunk."""

    rows: slice
    chunk: Tensor
    part: slice
    logits: Tensor


def tiles(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    adjust: Adjust,
    chunk: int,
    onednn: bool,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tile]:
    """All rows, tile by tile. Their logits are those of the chunk, or if these are in bf16, copies in fp32. What is
    written into a tile's `chunk` stays until the chunk's last tile is done. `product` takes the place of the usual
    product of rows with the head."""
    wide, size = wide_of(hidden.dtype), max(TILE // len(head), 1) if head.device.type == "cpu" else chunk
    buffer = hidden.new_empty(min(chunk, len(hidden)), len(head))
    in_wide = None if hidden.dtype == wide else hidden.new_empty(min(size, len(buffer)), len(head), dtype=wide)
    for rows in slices(0, len(hidden), chunk):
        if product is None:
            together = multiply(hidden[rows], head.T, buffer[: rows.stop - rows.start], onednn)
        else:
            together = product(hidden[rows])
        for part in slices(rows.start, rows.stop, size):
            logits = together[part.start - rows.start : part.stop - rows.start]
            logits = logits if in_wide is None else in_wide[: len(logits)].copy_(logits)
            yield Tile(rows, together, part, adjust(logits if bias is None else logits + bias, part))


class HeadGradient:
    """The gradients of hidden states and head, accumulated chunk by chunk from the gradients of the logits."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, head: Tensor, onednn: bool) -> None:
        self.hidden, self.head, self.wide, self.onednn = hidden, head, wide_of(hidden.dtype), onednn
        self.by_hidden, self.dtype = torch.empty_like(hidden), weight.dtype
        trains = ctx.needs_input_grad[1]  # with LoRA the head does not train
        self.by_weight = torch.zeros(weight.shape, dtype=self.wide, device=weight.device) if trains else None
        self.product = torch.empty_like(head) if trains and hidden.dtype != self.wide else None  # of one chunk

    def add(self, tile: Tile, by_logits: Tensor) -> None:
        """Write a tile's gradient over its logits; after the last tile of a chunk, multiply."""
        rows, part = tile.rows, tile.part
        place = tile.chunk[part.start - rows.start : part.stop - rows.start]
        if place.data_ptr() != by_logits.data_ptr():  # else it was computed in place
            place.copy_(by_logits)
        if part.stop == rows.stop:
            self._multiply(tile.chunk, rows)

    def _multiply(self, by_logits: Tensor, rows: slice) -> None:
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


def _scaled_gradient(exponentials: Tensor, sums: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    """`logits_gradient` from the softmax's exponentials and their sums [R 1]; overwrites the exponentials."""
    return exponentials.mul_(-share / sums).scatter_add_(1, targets, share)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The precision of everything behind the product with the head."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slices(start: int, stop: int, size: int) -> list[slice]:
    """From `start` to `stop` in slices of `size`, the last one perhaps smaller."""
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
