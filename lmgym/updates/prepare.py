"""What comes before an update: the columns that an algorithm requires, and what they say of the batch."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.functional import truncation
from lmgym.functional.advantages import deviation, explained_variance
from lmgym.functional.reductions import masked_mean
from lmgym.functional.spans import match_spans
from lmgym.pictures.ids import FIRST
from lmgym.updates.checks import checked_batch
from lmgym.updates.protocols import FrozenPolicy, TopTeacher, TrainablePolicy


@doing("scoring")
def prepare(batch: Batch, policy: TrainablePolicy, copies: Mapping[str, FrozenPolicy], algorithm: Algorithm) -> Batch:
    """Fill in the columns that the algorithm requires, then its advantages.

    `copies` are the frozen models that it requires, by name: "reference", "teacher". `logprobs_old` costs a forward
    pass. It is needed only if a batch serves more than one optimizer step (on the first the old policy is the new one),
    or if the algorithm asks for it before the first (`Requirements.old_logprobs`: a KL in the reward). The values and
    the sums over distributions come from the same pass. Raises LmgymError for a model that `copies`
    lacks, and for what the algorithm returns that is no batch.

    Example: prepare(collate(episodes), policy, {}, GRPO())"""
    required = algorithm.requirements
    _check_ids(batch, policy.vocabulary)
    scored = algorithm.before_scoring(batch.replace(vocabulary=policy.vocabulary))
    batch = checked_batch(algorithm, "before_scoring", scored)
    values = required.values and required.makes_policy  # a reward model's own scores are not a baseline
    sums: dict[str, Any] = {"sums": required.distribution_sums} if required.distribution_sums else {}
    if algorithm.optimizer_steps > 1 or required.old_logprobs or values or sums:
        old = policy.compute_logprobs_no_grad(batch, values=values, last_values=values, **sums)
        batch = batch.replace(
            logprobs_old=old.logprobs,
            values=old.values,
            last_values=old.last_values,
            distribution_sums=old.distribution_sums,
            sum_names=required.distribution_sums,
        )
    if required.reference:
        batch = batch.replace(
            logprobs_ref=_copy(copies, "reference", algorithm).compute_logprobs_no_grad(batch).logprobs
        )
    if required.teacher and required.divergence is None:
        read = batch if batch.hinted is None else batch.hinted  # the prompts that the teacher reads
        taught = _copy(copies, "teacher", algorithm).compute_logprobs_no_grad(read).logprobs
        if read is not batch:
            taught = taught.new_zeros(batch.actions.shape).masked_scatter_(batch.actions, taught[read.actions])
        batch = batch.replace(logprobs_teacher=taught)
    if required.served_teacher is not None:
        batch = _with_teacher_top(batch, copies.get("teacher"))
    return checked_batch(algorithm, "advantages", algorithm.advantages(batch))


def _copy(copies: Mapping[str, FrozenPolicy], name: str, algorithm: Algorithm) -> FrozenPolicy:
    """The frozen model of this name. Raises LmgymError if there is none."""
    if name not in copies:
        how = {"reference": "lmgym.models.copies.frozen(policy), made before the first update"}
        raise LmgymError(
            f"{type(algorithm).__name__} needs a frozen model, and `prepare` was given no '{name}'; give it as its "
            f"third argument {{'{name}': model}}, such as {how.get(name, 'load_policy(PolicySection(model=...))')}"
        )
    return copies[name]


def _with_teacher_top(batch: Batch, teacher: FrozenPolicy | None) -> Batch:
    """The batch with the teacher's most likely tokens at its actions (in the same order behind prompts with a hint)."""
    if not isinstance(teacher, TopTeacher):
        raise LmgymError(
            "algorithm.teacher is an address, and `prepare` was given no teacher behind one; give it "
            '{"teacher": ...} as lmgym.training.begin_stage does'
        )
    found = teacher.top_logprobs(batch if batch.hinted is None else batch.hinted)
    places = torch.arange(len(found.ids))
    taught = torch.zeros(batch.actions.shape, dtype=torch.long).masked_scatter_(batch.actions.cpu(), places)
    return batch.replace(teacher_top=found, taught=taught)


def _check_ids(batch: Batch, vocabulary: int) -> None:
    """Raise LmgymError for tokens that the policy does not have, as a reference may hold."""
    for column in (batch.tokens, batch.source):
        beyond = [] if column is None else column[(column >= vocabulary) & (column < FIRST)].tolist()
        if beyond:
            raise LmgymError(
                f"a text that is trained on holds the token id {beyond[0]}, and the model has the ids 0 to "
                f"{vocabulary - 1} only; name the model's own tokenizer (policy.tokenizer)"
            )


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What can be said of a prepared batch without a forward pass. `entropy` is the Monte-Carlo estimate
    -mean(log-probability of the sampled tokens): unbiased, free of cost (the exact one replaces it where the algorithm
    asks for entropies)."""
    metrics = {"advantage/std": 0.0}
    if batch.advantages is not None:
        metrics["advantage/std"] = float(deviation(batch.advantages[batch.actions]))
    if batch.logprobs_sampler is not None:
        metrics["entropy"] = -float(masked_mean(batch.logprobs_sampler, batch.actions))
    if batch.sampling_mask is not None:
        metrics["kept/tokens"] = float(truncation.sizes(batch.sampling_mask.bits).double().mean())
    if batch.logprobs_ref is not None and batch.logprobs_sampler is not None:
        metrics["kl/reference"] = float(masked_mean(batch.logprobs_sampler - batch.logprobs_ref, batch.actions))
    if batch.span is not None and batch.hinted is not None:
        spans = match_spans(batch.span, batch.actions, batch.hinted.require("span"), batch.hinted.actions)
        kinds = {"single": spans.single, "longer": spans.longer, "none": ~(spans.single | spans.longer)}
        metrics |= {f"spans/{name}": float(kind.double().mean()) for name, kind in kinds.items()}
    if batch.values is not None and batch.returns is not None:
        metrics["value/mean"] = float(masked_mean(batch.values, batch.actions))
        metrics["value/explained_variance"] = float(explained_variance(batch.values, batch.returns, batch.actions))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
