"""The divergence of a student from a teacher over the whole vocabulary, from the hidden states of both.

As fused_logprobs.py does for log-probabilities, it works in chunks of rows, so that neither model's logits [R V] ever
exist: memory grows with R x H, and not with R x V. Backward computes both logits of a chunk again."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.functional.divergences import Divergence
from lmgym.models.kernels.fused_logprobs import Adjust, HeadGradient, Tile, logits_gradient, tiles, wide_of

# From a slice of the R rows to the teacher's own logits of them, W tokens wide.
TeacherLogits = Callable[[slice], Float[Tensor, "r W"]]
# From the student's log-probabilities [r V] of a part of the rows to their divergences [r], and the gradient of these
# by the logits of the first S tokens [r S].
OfPart = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
# From a slice of the R rows, of which the teacher computes what it has to, to the function for parts of them.
Comparison = Callable[[slice], OfPart]


class FusedDivergence(torch.autograd.Function):
    """Log-probability of each target [R] under the student, and the divergence of its distribution [R], in nats.

    apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, chunk, comparison, onednn,
    computed)

    `adjust`, `scale`, `chunk`, `onednn` and `computed` are those of `FusedLogprobs`. The `comparison` is `with_logits`
    or `with_top`. The teacher has no gradient, and must say the same in backward."""

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
        computed: Float[Tensor, "V H"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = adjust, scale, chunk, comparison, onednn, computed
        logprobs, divergences = (hidden.new_zeros(len(hidden), dtype=wide_of(hidden.dtype)) for _ in range(2))
        head = weight.to(hidden.dtype) if computed is None else computed
        for tile, compare in _compared(tiles(hidden, head, bias, adjust, chunk, onednn), comparison):
            student = tile.logits.log_softmax(-1)
            logprobs[tile.part] = student.gather(1, targets[tile.part, None])[:, 0]
            divergences[tile.part] = compare(student, tile.part)[0]
        return logprobs, divergences

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_divergence: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        adjust, scale, chunk, comparison, onednn, computed = ctx.settings
        head = weight.to(hidden.dtype) if computed is None else computed
        gradient = HeadGradient(ctx, hidden, weight, head, onednn)
        for tile, compare in _compared(tiles(hidden, head, bias, adjust, chunk, onednn), comparison):
            part, student = tile.part, tile.logits.log_softmax(-1)
            _, by_shared = compare(student, part)
            by_logits = logits_gradient(student, scale * by_logprob[part, None], targets[part, None])
            by_logits[:, : by_shared.shape[1]].addcmul_(by_shared, scale * by_divergence[part, None])
            gradient.add(tile, by_logits)
        return *gradient.both, *[None] * 8


def with_logits(divergence: Divergence, teacher_logits: TeacherLogits, adjust: Adjust) -> Comparison:
    """The comparison with a teacher whose logits are known; `adjust` is applied to them too. Where its head has another
    size than the student's, see `shared_logprobs`."""

    def of_chunk(rows: slice) -> OfPart:
        taught = teacher_logits(rows)

        def of_part(student: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            own = taught[part.start - rows.start : part.stop - rows.start].to(student.dtype)
            adjusted = adjust_teacher(own, part, student.shape[1], adjust)
            return divergence.of(*shared_logprobs(student, adjusted))

        return of_part

    return of_chunk


def with_top(divergence: Divergence, ids: Int[Tensor, "R K"], logprobs: Float[Tensor, "R K+1"]) -> Comparison:
    """The comparison with a teacher of which the K most likely tokens are known (`Divergence.of_top`)."""

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


def _compared(each: Iterator[Tile], comparison: Comparison) -> Iterator[tuple[Tile, OfPart]]:
    """The tiles, each with what compares it; a chunk is compared by one, made at its first tile."""
    compare: OfPart
    for tile in each:
        if tile.part.start == tile.rows.start:
            compare = comparison(tile.rows)
        yield tile, compare


def adjust_teacher(logits: Float[Tensor, "r W"], part: slice, vocabulary: int, adjust: Adjust) -> Float[Tensor, "r W"]:
    """The teacher's logits of the rows `part` after `adjust`, which knows the student's `vocabulary` alone."""
    width = logits.shape[1]
    if width < vocabulary:
        return adjust(torch.nn.functional.pad(logits, (0, vocabulary - width)), part)[:, :width]
    return adjust(logits[:, :vocabulary], part)
