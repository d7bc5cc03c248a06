"""The divergence of a student from a teacher over the whole vocabulary, from the hidden states of both.

As fused_logprobs.py does for log-probabilities, it works in chunks of rows, so that neither model's logits [R V] ever
exist: memory grows with R x H, and not with R x V. Backward computes both logits of a chunk again.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.functional.divergences import Divergence
from lmgym.models.kernels import fused_logprobs
from lmgym.models.kernels.fused_logprobs import (
    Adjust,
    HeadGradient,
    adjust_tile,
    logits_gradient,
    slices,
    store_tile,
    tile_buffer,
    wide_of,
)
from lmgym.models.kernels.onednn_products import multiply

# From a slice of the R rows to the teacher's own logits of them, W tokens wide.
TeacherLogits = Callable[[slice], Float[Tensor, "r W"]]
# From the student's log-probabilities [r V] of a part of the rows to their divergences [r], and the gradient of these
# by the logits of the first S tokens [r S].
OfPart = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
# From a slice of the R rows, of which the teacher computes what it has to, to the function for parts of them.
Comparison = Callable[[slice], OfPart]


class FusedDivergence(torch.autograd.Function):
    """Log-probability of each target [R] under the student, and the divergence of its distribution [R], in nats.

    apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, chunk, comparison, onednn)

    `adjust`, `scale`, `chunk` and `onednn` are those of `FusedLogprobs`. The `comparison` is `with_logits` or
    `with_top`. The teacher has no gradient, and must say the same in backward.

    Example:
        >>> same = lambda logits, rows: logits
        >>> comparison = with_logits(Divergence("reverse_kl"), teacher_logits, same)
        >>> logprobs, divergences = FusedDivergence.apply(hidden, head.weight, None, targets, same, 1.0, 64, comparison)
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
        chunk: int,
        comparison: Comparison,
        onednn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = adjust, scale, chunk, comparison, onednn
        logprobs, divergences = (hidden.new_zeros(len(hidden), dtype=wide_of(hidden.dtype)) for _ in range(2))
        head = weight.to(hidden.dtype)
        for tile in _tiles(hidden, head, bias, adjust, chunk, comparison, onednn):
            student = tile.student.log_softmax(-1)
            logprobs[tile.part] = student.gather(1, targets[tile.part, None])[:, 0]
            divergences[tile.part] = tile.compare(student, tile.part)[0]
        return logprobs, divergences

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_divergence: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        adjust, scale, chunk, comparison, onednn = ctx.settings
        head = weight.to(hidden.dtype)
        gradient = HeadGradient(ctx, hidden, weight, head, onednn)
        for tile in _tiles(hidden, head, bias, adjust, chunk, comparison, onednn):
            part, student = tile.part, tile.student.log_softmax(-1)
            _, by_shared = tile.compare(student, part)
            by_logits = logits_gradient(student, scale * by_logprob[part, None], targets[part, None])
            by_logits[:, : by_shared.shape[1]].addcmul_(by_shared, scale * by_divergence[part, None])
            store_tile(by_logits, tile.chunk, tile.rows, part)
            if part.stop == tile.rows.stop:  # the chunk is complete
                gradient.add(tile.chunk, tile.rows)
        return *gradient.both, *[None] * 7


def with_logits(divergence: Divergence, teacher_logits: TeacherLogits, adjust: Adjust) -> Comparison:
    """The comparison with a teacher whose logits are known; `adjust` is applied to them too. Where its head has another
    size than the student's, see `shared_logprobs`.

    Example: with_logits(Divergence("jsd"), lambda rows: taught[rows] @ head.T, lambda logits, rows: logits)
    """

    def of_chunk(rows: slice) -> OfPart:
        taught = teacher_logits(rows)

        def of_part(student: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            own = taught[part.start - rows.start : part.stop - rows.start].to(student.dtype)
            adjusted = adjust_teacher(own, part, student.shape[1], adjust)
            return divergence.of(*shared_logprobs(student, adjusted))

        return of_part

    return of_chunk


def with_top(divergence: Divergence, ids: Int[Tensor, "R K"], logprobs: Float[Tensor, "R K+1"]) -> Comparison:
    """The comparison with a teacher of which the K most likely tokens are known (`Divergence.of_top`).

    Example: with_top(Divergence("reverse_kl"), ids, logprobs)
    """

    def of_part(student: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return divergence.of_top(student, ids[part].long(), logprobs[part].to(student.dtype))

    return lambda rows: of_part


def shared_logprobs(
    student: Float[Tensor, "R V"], teacher_logits: Float[Tensor, "R W"]
) -> tuple[Float[Tensor, "R S"], Float[Tensor, "R S"]]:
    """The log-probabilities of both on the tokens that both have, S = min(V, W), from the student's log-probabilities
    and the teacher's logits. Heads of one tokenizer may be padded to different sizes: what only one has is never a
    token of a text, and each distribution is renormalised without it."""
    shared = min(student.shape[1], teacher_logits.shape[1])
    own = student if student.shape[1] == shared else student[:, :shared].log_softmax(-1)
    return own, teacher_logits[:, :shared].log_softmax(-1)


class _Tile(NamedTuple):
    """Some rows (`part`) of a chunk of them (`rows`): the student's logits, adjusted, its own ones of the chunk, and
    what compares them with the teacher's."""

    rows: slice
    chunk: Tensor
    part: slice
    student: Tensor
    compare: OfPart


def _tiles(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    adjust: Adjust,
    chunk: int,
    comparison: Comparison,
    onednn: bool,
) -> Iterator[_Tile]:
    """All rows, tile by tile. What is written into a tile's `chunk` stays until the chunk's last tile is done."""
    buffer, in_wide = hidden.new_empty(min(chunk, len(hidden)), len(head)), tile_buffer(hidden, head)
    for rows in slices(0, len(hidden), chunk):
        logits = multiply(hidden[rows], head.T, buffer[: rows.stop - rows.start], onednn)
        compare = comparison(rows)
        for part in slices(rows.start, rows.stop, max(fused_logprobs.TILE // len(head), 1)):
            yield _Tile(rows, logits, part, adjust_tile(logits, rows, part, bias, adjust, in_wide), compare)


def adjust_teacher(logits: Float[Tensor, "r W"], part: slice, vocabulary: int, adjust: Adjust) -> Float[Tensor, "r W"]:
    """The teacher's logits of the rows `part` after `adjust`, which knows the student's `vocabulary` alone."""
    width = logits.shape[1]
    if width < vocabulary:
        return adjust(torch.nn.functional.pad(logits, (0, vocabulary - width)), part)[:, :width]
    return adjust(logits[:, :vocabulary], part)
