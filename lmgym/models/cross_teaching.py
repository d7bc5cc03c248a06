"""A teacher with another tokenizer beside a policy: both have read the same text in tokens of their own.

Tokens are compared by spans, the shortest pieces of the text that begin and end at once in both (text/alignment.py):
the policy's m tokens of a span and the teacher's k write the same bytes.

m = k = 1   The divergence of whole next-token distributions, over the tokens that both vocabularies have, by their
            bytes, and one bucket for all others, with its exact gradient. Taking outcomes together makes no divergence
            larger, so where both tokenizers would cut every text alike it is a lower bound of the whole one. Else it is
            an approximation: "th" as the next token is not the same event for a model that may also say "the" in one
            token and for one that must go on with "e".
else        By the chain rule log p(span) is the sum of the policy's m log-probabilities, log q(span) that of the
            teacher's k. The span counts as one outcome drawn from p: an estimate of the divergence over spans, and its
            score-function gradient (`Divergence.of_sample`) by all m log-probabilities. The policy must have sampled
            it. q(span) is the probability of the one cut that the teacher's tokenizer makes, a little less than that
            of the text.

Which of the two a place gets depends on what was sampled there; no token is credited with later spans. Tokens in no
span (bytes of no character, control tokens) have a divergence of 0."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.batch import Batch, States
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import SMALLEST_REST, Divergence
from lmgym.models.distributions import logprobs_of_states
from lmgym.models.kernels.fused_divergence import Comparison, OfPart, TeacherLogits
from lmgym.models.scoring import ScoringModel
from lmgym.models.teaching import Compared, Teacher, compare_by, logits_of, teacher_states


class CommonTokens(NamedTuple):
    """Ids of the tokens that are taken for each other, of the policy and of its teacher.
    Example: CommonTokens(policy=torch.tensor([3, 4]), teacher=torch.tensor([17, 235]))"""

    policy: Int[Tensor, " K"]
    teacher: Int[Tensor, " K"]


def common_tokens(pairs: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> CommonTokens:
    """Pairs of ids as tensors. Example: common_tokens([(3, 17), (4, 235)]).teacher -> tensor([17, 235])"""
    ids = torch.tensor(list(pairs), dtype=torch.long, device=device).reshape(-1, 2)
    return CommonTokens(ids[:, 0].contiguous(), ids[:, 1].contiguous())


class _Spans(NamedTuple):
    """The span of each token, counted through all rows: of R actions of the policy and S of the teacher; how many
    tokens of the policy each of the spans has; and which tokens are in a span of one on both sides, or of more."""

    own: Int[Tensor, " R"]
    other: Int[Tensor, " S"]
    sizes: Int[Tensor, " G"]
    single: Bool[Tensor, " R"]
    longer: Bool[Tensor, " R"]
    other_single: Bool[Tensor, " S"]
    other_longer: Bool[Tensor, " S"]


def compare_spans(
    model: ScoringModel,
    teacher: Teacher,
    common: CommonTokens | None,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    divergence: Divergence,
) -> Compared:
    """`compare` for a teacher with another tokenizer, which reads `batch.hinted`: by the spans of `batch.span`.

    The divergence of a longer span is spread evenly over its m tokens. The temperature is applied to both models. The
    teacher runs without gradient, and the logits [r V] and [r W] of a chunk exist at a time. Raises LmgymError without
    `batch.hinted` or without `common`."""
    read = batch.hinted
    if read is None or common is None:
        raise LmgymError(
            "the batch has spans of another tokenizer, but not what the teacher reads (`hinted`), or the policy has no "
            "`common` tokens with it; lmgym.training.stage gives both"
        )
    other_row, other_column = read.actions.nonzero(as_tuple=True)
    spans = _spans(batch, read, row, column, other_row, other_column)
    # 1. The teacher: its logits at spans of one token, its log-probabilities of the tokens in longer ones.
    taught = teacher_states(teacher, read, other_row, other_column)
    logits = logits_of(teacher, _some(taught, spans.other_single))
    longer = spans.other_longer
    with torch.no_grad(), teacher.precision():
        places = other_row[longer], other_column[longer]
        said, _ = logprobs_of_states(teacher, read, _some(taught, longer), *places, entropy=False)
    # 2. The policy: all log-probabilities, and whole distributions at spans of one token.
    comparison = with_common(divergence, common, logits, spans.single, batch.temperature or 1.0)
    chunk = min(model.head_chunk, teacher.head_chunk)
    logprobs, divergences = compare_by(model, batch, states, row, column, comparison, chunk)
    # 3. Longer spans, each as one outcome.
    own = spans.own[spans.longer]
    p, q = (
        torch.zeros(len(spans.sizes), dtype=logprobs.dtype, device=logprobs.device).index_add(0, span, one)
        for span, one in ((own, logprobs.detach()[spans.longer]), (spans.other[longer], said.to(logprobs.dtype)))
    )
    value, factor = divergence.of_sample(p[own], q[own])
    sampled = logprobs[spans.longer]
    of_longer = value / spans.sizes[own] + factor * (sampled - sampled.detach())
    return Compared(logprobs, divergences.masked_scatter(spans.longer, of_longer))


def with_common(
    divergence: Divergence,
    common: CommonTokens,
    teacher_logits: TeacherLogits,
    single: Bool[Tensor, " R"],
    temperature: float = 1.0,
) -> Comparison:
    """The comparison of the rows that are `single` with a teacher whose logits are known of these alone, over the K
    common tokens and one bucket for all others (`Divergence.of_top`); 0 for the other rows."""
    before = [0, *single.cumsum(0).tolist()]  # of the teacher's rows, before each of the policy's

    def of_chunk(rows: slice) -> OfPart:
        first, last = before[rows.start], before[rows.stop]
        taught = teacher_logits(slice(first, last)) if first < last else None

        def of_part(student: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            values, by_logits = student.new_zeros(len(student)), torch.zeros_like(student)
            begin, end = before[part.start], before[part.stop]
            if taught is not None and begin < end:
                own, which = taught[begin - first : end - first].to(student.dtype) / temperature, single[part]
                grouped = common_logprobs(own.log_softmax(-1), common.teacher)
                ids = common.policy.expand(end - begin, -1)
                values[which], by_logits[which] = divergence.of_top(student[which], ids, grouped)
            return values, by_logits

        return of_part

    return of_chunk


def common_logprobs(logprobs: Float[Tensor, "R W"], ids: Int[Tensor, " K"]) -> Float[Tensor, "R K+1"]:
    """The log-probabilities of K tokens, and behind them that of all others together, which get at least
    `SMALLEST_REST`: a teacher whose every token the policy has finds the policy's other tokens that unlikely.

    Example: common_logprobs(torch.tensor([[.5, .3, .2]]).log(), torch.tensor([2])).exp() -> [[.2, .8]]"""
    rest = logprobs.index_fill(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    least = torch.tensor(SMALLEST_REST, dtype=logprobs.dtype, device=logprobs.device).log()
    return torch.cat([logprobs[:, ids], rest.maximum(least)], 1)


def _spans(batch: Batch, read: Batch, row: Tensor, column: Tensor, other_row: Tensor, other_column: Tensor) -> _Spans:
    own, other = batch.require("span"), read.require("span")
    width = 1 + int(max(own.max(), other.max()))
    number, other_number = own[row, column], other[other_row, other_column]
    inside, other_inside = number > 0, other_number > 0
    number, other_number = row * width + number, other_row * width + other_number
    sizes, other_sizes = (torch.bincount(one, minlength=len(batch) * width) for one in (number, other_number))
    single = (sizes == 1) & (other_sizes == 1)
    both = (sizes > 0) & (other_sizes > 0) & ~single
    return _Spans(
        number,
        other_number,
        sizes,
        inside & single[number],
        inside & both[number],
        other_inside & single[other_number],
        other_inside & both[other_number],
    )


def _some(states: States, which: Bool[Tensor, " R"]) -> States:
    return States(states.hidden[which], None if states.logits is None else states.logits[which])
