"""How a model judges held-out answers that were judged before: the order of pairs, the steps of answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmgym.algorithms.process_reward_model import step_logits
from lmgym.batch import collate
from lmgym.core import registry
from lmgym.core.registry import register
from lmgym.functional.preferences import best_and_worst, ordered
from lmgym.functional.steps import first_wrong, step_ends
from lmgym.rollouts.given_answers import labelled_steps, rated_answers
from lmgym.stats.calibration import Bin, calibration_bins, calibration_error
from lmgym.stats.intervals import Interval, mean_interval, student_t
from lmgym.training.stage import StageRun
from lmgym.types import Example, told_apart


@dataclass(frozen=True)
class Judgements:
    """What an evaluation reports of given answers: results with intervals, and how sure against how right a reward
    model was, by bins.

    Example: Judgements({"step/accuracy": Interval(0.71, 0.65, 0.76, 120)}, [Bin(...), ...])"""

    results: dict[str, Interval] = field(default_factory=dict)
    bins: list[Bin] = field(default_factory=list)


def judgements(stage: StageRun, examples: Sequence[Example]) -> Judgements:
    """What the judge of a stage's source finds; empty for a source that has none, and where an example has no answer.

    Example: judgements(stage, examples).results["preference/accuracy"] -> Interval(mean=0.71, low=0.65, ...)"""
    source = stage.source
    if source.judge is None or not all(map(source.texts, examples)):
        return Judgements()
    judged: Judgements = registry.get("judge", source.judge)(stage, examples)
    return judged


@register("judge", "pairs")
def pair_judgements(stage: StageRun, examples: Sequence[Example]) -> Judgements:
    """The share of the held-out pairs whose better answer the policy scores higher (`Algorithm.answer_scores`), equal
    scores counted as half, and the mean difference of the two scores, with intervals over the pairs. Of a reward model
    also the calibration of sigmoid(difference), its probability that the better answer is better. Empty if no example
    has two answers of different ratings."""
    required, policy = stage.algorithm.requirements, stage.run.policy
    # 1. What policy and reference say of all the answers.
    batch = collate(rated_answers(list(enumerate(examples)), stage.actor), policy.pad_id)
    chosen, rejected = best_and_worst(batch.score, batch.group)
    if not len(chosen):
        return Judgements()
    if required.reference:
        reference = stage.frozen_models.models["reference"]
        batch = batch.replace(logprobs_ref=reference.compute_logprobs_no_grad(batch).logprobs)
    said = policy.compute_logprobs_no_grad(batch, values=required.values, last_values=required.values)
    # 2. The scores of each pair.
    scores = stage.algorithm.answer_scores(batch, said).double()
    margins = scores[chosen] - scores[rejected]
    right = mean_interval([[value] for value in ordered(margins).tolist()], shares=True)
    results = {"preference/accuracy": right, "preference/margin": student_t(margins.tolist())}
    if required.makes_policy:
        return Judgements(results)
    return with_calibration(results, margins)


@register("judge", "steps")
def step_judgements(stage: StageRun, examples: Sequence[Example]) -> Judgements:
    """The share of the held-out steps that are found right or wrong as labelled, a probability of 1/2 counted as half;
    of the answers with a wrong step, the share whose first one is found; of those without, the share in which none is
    found. A step is found wrong below a probability of 1/2. Prompts are the independent units of all intervals, and
    each has the same weight. Also the calibration of the probabilities."""
    required, policy = stage.algorithm.requirements, stage.run.policy
    # 1. What the model says of each step.
    batch = collate(labelled_steps(list(enumerate(examples)), stage.actor, required.separator), policy.pad_id)
    said = policy.compute_logprobs_no_grad(batch, values=True, last_values=True)
    logits, labels = step_logits(batch, said)
    answer = step_ends(batch.actions, batch.require("turn")).nonzero()[:, 0]
    margins = (logits * (2 * labels - 1)).double()
    # 2. Steps, and the first wrong step of each answer.
    prompts = [told_apart(example.prompt) for example in examples]
    of_steps = [prompts[row] for row in answer.tolist()]
    results = {"step/accuracy": _by_prompt(zip(of_steps, ordered(margins).tolist(), strict=True))}
    true, found = first_wrong(labels > 0, answer), first_wrong(logits >= 0, answer)
    for name, chosen in (("step/first_wrong", true >= 0), ("step/all_right", true < 0)):
        hits = [(prompts[row], float(found[row] == true[row])) for row in chosen.nonzero()[:, 0].tolist()]
        if hits:
            results[name] = _by_prompt(hits)
    return with_calibration(results, margins)


def with_calibration(results: dict[str, Interval], margins: Tensor) -> Judgements:
    """The results, the calibration of decisions whose logits are `margins`, above 0 where the decision is right, and
    their bins; without it for a model that has lost its numbers. Its error has no interval: it is no mean."""
    if not bool(margins.isfinite().all()):
        return Judgements(results)
    confidences = torch.sigmoid(margins.abs()).tolist()
    bins = calibration_bins(confidences, ordered(margins).tolist())
    error = calibration_error(bins)
    return Judgements(results | {"calibration/error": Interval(error, float("nan"), float("nan"), len(margins))}, bins)


def _by_prompt(values: Iterable[tuple[str, float]]) -> Interval:
    """The mean over prompts of shares, from (prompt, value)."""
    own: dict[str, list[float]] = {}
    for prompt, value in values:
        own.setdefault(prompt, []).append(value)
    return mean_interval(list(own.values()), shares=True)
