"""A teacher beside a policy: how far the policy's distributions are from the teacher's, over the whole vocabulary, or
over the teacher's most likely tokens and one bucket for all others."""

from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmgym.batch import Batch, States
from lmgym.core.errors import LmgymError
from lmgym.distributed.parts import whole
from lmgym.functional.divergences import Divergence
from lmgym.models.distributions import action_logits, bias_of, has_plain_head, whole_head
from lmgym.models.kernels.fused_divergence import (
    Comparison,
    FusedDivergence,
    OfPart,
    TeacherLogits,
    with_logits,
    with_top,
)
from lmgym.models.kernels.onednn_products import multiply
from lmgym.models.scoring import ScoringModel
from lmgym.pictures.ids import FIRST


class Teacher(ScoringModel, Protocol):
    """What is needed of a teacher (models/policy.py describes each member)."""

    vocabulary: int

    def states(self, batch: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States: ...

    def precision(self) -> Any: ...


class Compared(NamedTuple):
    """Of R actions, in nats: their log-probabilities under the policy, and how far its distributions are from the
    teacher's. Example: compare(policy, teacher, batch, states, row, column, divergence).divergences"""

    logprobs: Float[Tensor, " R"]
    divergences: Float[Tensor, " R"]


def compare(
    model: ScoringModel,
    teacher: Teacher | None,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    divergence: Divergence,
) -> Compared:
    """Compare a policy with its teacher at the actions (row, column), whose hidden states are the first R of `states`.

    The teacher reads `batch.hinted`, if there is one, else the same rows; it has no gradient. Temperature, excluded
    stop ids and kept sets are those that the actions were sampled with, for both. Without a teacher here, what it said
    of its most likely tokens is in `batch.teacher_top`. The logits of `model.head_chunk` actions exist at a time."""

    if teacher is None:
        comparison = with_top(divergence, *batch.top_of(row, column))
    else:
        read = batch if batch.hinted is None else batch.hinted
        taught = logits_of(teacher, teacher_states(teacher, read, *read.actions.nonzero(as_tuple=True)))
        comparison = with_logits(divergence, taught, lambda z, part: action_logits(z, batch, row[part], column[part]))
    return compare_by(model, batch, states, row, column, comparison, model.head_chunk)


def compare_by(
    model: ScoringModel,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    comparison: Comparison,
    chunk: int,
) -> Compared:
    """A policy's log-probabilities of the actions (row, column), and the divergences that a comparison makes of their
    distributions. The logits of `chunk` actions exist at a time."""

    def adjust(logits: Tensor, part: slice) -> Tensor:
        return action_logits(logits, batch, row[part], column[part])

    if states.logits is None and has_plain_head(model):
        hidden = states.hidden[: len(row)]
        weight, computed = model.head_weights
        hidden = hidden if model.compute == model.master else hidden.to(model.compute)
        scale, bias = 1.0 if batch.temperature == 0 else 1 / batch.temperature, bias_of(model)
        return Compared(
            *FusedDivergence.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, batch.tokens[row, column], adjust, scale, chunk,
                comparison, model.onednn, computed,
            )
        )  # fmt: skip

    shown = whole_head(model) if states.logits is None else nullcontext

    # Any other head: autograd over the chunks, which are computed again in backward if there are several.
    def compare_chunk(inputs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        with model.rounded_weights(), shown():  # in backward too
            own = model.head(inputs) if states.logits is None else inputs
        student = adjust(own, part).log_softmax(-1)
        logprobs = student.gather(1, batch.tokens[row[part], column[part]][:, None])[:, 0]
        return logprobs, _Divergences.apply(student, comparison(part), part)  # type: ignore[no-untyped-call]

    inputs, chunks = states.hidden if states.logits is None else states.logits, []
    for start in range(0, max(len(row), 1), chunk):
        part = slice(start, min(start + chunk, len(row)))
        if torch.is_grad_enabled() and len(row) > chunk:
            chunks.append(checkpoint(compare_chunk, inputs[part], part, use_reentrant=False))
        else:
            chunks.append(compare_chunk(inputs[part], part))
    return Compared(torch.cat([found[0] for found in chunks]), torch.cat([found[1] for found in chunks]))


class _Divergences(torch.autograd.Function):
    """apply(student log-probabilities [R V], comparison of these rows, the rows) -> [R]: autograd's part of `compare`.
    A comparison has the gradient by the logits, which for log-probabilities of a softmax is the one by themselves."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, of_part: OfPart, part: slice) -> Tensor:
        value, by_logits = of_part(student, part)
        ctx.width = student.shape[1]
        ctx.save_for_backward(by_logits)
        return value

    @staticmethod
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        (by_logits,) = ctx.saved_tensors
        wide = torch.nn.functional.pad(by_logits, (0, ctx.width - by_logits.shape[1]))
        return by_value[:, None] * wide, None, None


def teacher_states(teacher: Teacher, read: Batch, row: Int[Tensor, " R"], column: Int[Tensor, " R"]) -> States:
    """Run the teacher over what it reads, without gradient: the states that predict the actions (row, column)."""
    texts = [tokens[tokens < FIRST] for tokens in (read.tokens, read.source) if tokens is not None]
    largest = max(int(tokens.max()) for tokens in texts)
    if largest >= teacher.vocabulary:
        raise LmgymError(
            f"an answer holds the token id {largest}, and the teacher has the ids 0 to {teacher.vocabulary - 1} only; "
            "take another teacher, or leave ids that the tokenizer does not have out of sampling (sampling.top_p)"
        )
    with torch.no_grad(), teacher.precision():
        return teacher.states(read, row, column - 1)


def logits_of(teacher: Teacher, states: States) -> TeacherLogits:
    """A function from a slice of these states to the teacher's logits [r W] there."""
    logits = states.logits
    if logits is not None:
        return lambda part: logits[part]
    if not has_plain_head(teacher):
        with torch.no_grad():
            shown = whole_head(teacher)

        def through_head(part: slice) -> Tensor:
            with torch.no_grad(), teacher.precision(), shown():
                return teacher.head(states.hidden[part])

        return through_head
    hidden, bias = states.hidden.to(teacher.compute), bias_of(teacher)
    weight = whole(teacher.model.get_output_embeddings().weight).detach().to(teacher.compute)
    buffer = hidden.new_empty(0, len(weight))

    def product(part: slice) -> Tensor:
        nonlocal buffer
        count = len(hidden[part])
        if len(buffer) < count:
            buffer = hidden.new_empty(count, len(weight))
        chunk = multiply(hidden[part], weight.T, buffer[:count], teacher.onednn)
        return chunk if bias is None else chunk + bias

    return product
