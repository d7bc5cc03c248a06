"""How often a policy orders held-out pairs as their ratings do."""

from collections.abc import Sequence

from lmgym.batch import collate
from lmgym.functional.preferences import best_and_worst, ordered
from lmgym.rollouts.given_answers import rated_answers
from lmgym.stats.intervals import Interval, mean_interval, student_t
from lmgym.training.stage import StageRun
from lmgym.types import Example


def preference_results(stage: StageRun, examples: Sequence[Example]) -> dict[str, Interval]:
    """The share of the held-out pairs whose better answer the policy scores higher (`Algorithm.answer_scores`), equal
    scores counted as half, and the mean difference of the two scores, with intervals over the pairs. Empty if the stage
    does not learn from rated answers, if an example has none, or if no example has two of different ratings.

    Example: preference_results(stage, examples)["preference/accuracy"] -> Interval(mean=0.71, low=0.65, high=0.76, ...)
    """
    required, policy = stage.algorithm.requirements, stage.run.policy
    if required.answers != "rated" or not all(example.rated for example in examples):
        return {}
    # 1. What policy and reference say of all the answers.
    batch = collate(rated_answers(list(enumerate(examples)), stage.actor), policy.pad_id)
    chosen, rejected = best_and_worst(batch.score, batch.group)
    if not len(chosen):
        return {}
    if required.reference:
        reference = stage.frozen_models.models["reference"]
        batch = batch.replace(logprobs_ref=reference.compute_logprobs_no_grad(batch).logprobs)
    said = policy.compute_logprobs_no_grad(batch, values=required.values, last_values=required.values)
    # 2. The scores of each pair.
    scores = stage.algorithm.answer_scores(batch, said).double()
    margins = scores[chosen] - scores[rejected]
    right = mean_interval([[value] for value in ordered(margins).tolist()], shares=True)
    return {"preference/accuracy": right, "preference/margin": student_t(margins.tolist())}
