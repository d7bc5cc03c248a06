"""A teacher with another tokenizer beside a policy: both have read the same text in tokens of their own.

Tokens are compared by spans, the shortest pieces of the text that begin and end at once in both (text/alignment.py):
the policy's m tokens of a span and the teacher's k write the same bytes.

m = k = 1   The divergence of whole next-token distributions, with its exact gradient, over the tokens that both
            vocabularies have. Any other token counts as the common one that its text begins with, and the few that
            begin with none are one bucket (text/token_pairs.py). Taking outcomes together makes no divergence larger,
            so this is a lower bound. It is an approximation where a tokenizer may cut a text in a way that it usually
            does not: "th" then "e", where it has "the".
else        By the chain rule log p(span) is the sum of the policy's m log-probabilities, log q(span) that of the
            teacher's k. The span counts as one outcome drawn from p: an estimate of the divergence over spans, and its
            score-function gradient (`Divergence.of_sample`) by all m log-probabilities. The policy must have sampled
            it. q(span) is the probability of the one cut that the teacher's tokenizer makes, a little less than that
            of the text.

Which of the two a place gets depends on what was sampled there; no token is credited with later spans. Tokens in no
span (bytes of no character, control tokens) have a divergence of 0."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.batch import Batch, States
from lmgym.core.errors import LmgymError
from lmgym.functional.divergences import SMALLEST_REST, Divergence, class_logprobs
from lmgym.functional.spans import match_spans
from lmgym.models.distributions import logprobs_of_states
from lmgym.models.kernels.fused_divergence import Comparison, OfPart, TeacherLogits
from lmgym.models.scoring import ScoringModel
from lmgym.models.teaching import Compared, Teacher, compare_by, logits_of, teacher_states
from lmgym.text.token_pairs import TokenPairs


class TokenClasses(NamedTuple):
    """The class of each token of the policy's head and of the teacher's: the outcomes that are compared, the last of
    them the `rest`. Example: TokenClasses(torch.tensor([0, 1, 0, 2]), torch.tensor([3, 2, 0, 1]), rest=3)"""

    policy: Int[Tensor, " V"]
    teacher: Int[Tensor, " W"]
    rest: int


def token_classes(pairs: TokenPairs, device: torch.device | str = "cpu") -> TokenClasses:
    """The classes as tensors. Example: token_classes(token_pairs(policy.tokenizer, teacher.tokenizer, "t"), "cuda")"""
    own, other = (torch.tensor(ids, device=device) for ids in (pairs.policy_classes, pairs.teacher_classes))
    return TokenClasses(own, other, pairs.rest)


def compare_spans(
    model: ScoringModel,
    teacher: Teacher,
    classes: TokenClasses | None,
    batch: Batch,
    states: States,
    row: Int[Tensor, " R"],
    column: Int[Tensor, " R"],
    divergence: Divergence,
) -> Compared:
    """`compare` for a teacher with another tokenizer, which reads `batch.hinted`: by the spans of `batch.span`.

    The divergence of a longer span is spread evenly over its m tokens. The temperature is applied to both models. The
    teacher runs without gradient, and the logits [r V] and [r W] of a chunk exist at a time. Raises LmgymError without
    `batch.hinted` or without `classes`."""
    read = batch.hinted
    if read is None or classes is None:
        raise LmgymError(
            "the batch has spans of another tokenizer, but not what the teacher reads (`hinted`), or the policy has no "
            "`classes` of tokens; lmgym.training.begin_stage gives both"
        )
    other_row, other_column = read.actions.nonzero(as_tuple=True)
    spans = match_spans(batch.require("span"), batch.actions, read.require("span"), read.actions)
    # 1. The teacher: its logits at spans of one token, its log-probabilities of the tokens in longer ones.
    taught = teacher_states(teacher, read, other_row, other_column)
    logits = logits_of(teacher, _some(taught, spans.other_single))
    longer = spans.other_longer
    with torch.no_grad(), teacher.precision():
        places = other_row[longer], other_column[longer]
        said, _ = logprobs_of_states(teacher, read, _some(taught, longer), *places, entropy=False)
    # 2. The policy: all log-probabilities, and whole distributions at spans of one token.
    comparison = with_classes(divergence, classes, logits, spans.single, batch.temperature or 1.0)
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


def with_classes(
    divergence: Divergence,
    classes: TokenClasses,
    teacher_logits: TeacherLogits,
    single: Bool[Tensor, " R"],
    temperature: float = 1.0,
) -> Comparison:
    """The comparison of the rows that are `single` with a teacher whose logits are known of these alone, over the
    classes of tokens (`Divergence.of_classes`); 0 for the other rows."""
    before = [0, *single.cumsum(0).tolist()]  # of the teacher's rows, before each of the policy's

    def of_chunk(rows: slice) -> OfPart:
        first, last = before[rows.start], before[rows.stop]
        taught = teacher_logits(slice(first, last)) if first < last else None

        def of_part(student: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            values, by_logits = student.new_zeros(len(student)), torch.zeros_like(student)
            begin, end = before[part.start], before[part.stop]
            if taught is not None and begin < end:
                own, which = taught[begin - first : end - first].to(student.dtype) / temperature, single[part]
                grouped = teacher_classes(own.log_softmax(-1), classes)
                values[which], by_logits[which] = divergence.of_classes(student[which], classes.policy, grouped)
            return values, by_logits

        return of_part

    return of_chunk


def teacher_classes(logprobs: Float[Tensor, "R W"], classes: TokenClasses) -> Float[Tensor, "R K"]:
    """The teacher's log-probability of each class. The rest gets at least `SMALLEST_REST`: a teacher without any such
    token finds the policy's that unlikely, not impossible."""
    grouped = class_logprobs(logprobs, classes.teacher, classes.rest + 1)
    grouped[:, -1].clamp_(min=math.log(SMALLEST_REST))
    return grouped


def _some(states: States, which: Bool[Tensor, " R"]) -> States:
    return States(states.hidden[which], None if states.logits is None else states.logits[which])
