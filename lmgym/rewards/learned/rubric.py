"""`rubric` and `endpoint_rubric`: a judge says yes or no to a list of weighted criteria, from the recipe or from each
example's data. One rubric, two kinds of judges: a local model, or a chat endpoint."""

from collections.abc import Sequence
from typing import Any

from lmgym.core.registry import register
from lmgym.processes.pool import Failure
from lmgym.rewards.learned.choices import YES_NO, Judge, LocalJudge, Question
from lmgym.rewards.learned.criteria import criteria_of, rubric_value
from lmgym.rewards.learned.endpoint import Served, by_endpoint
from lmgym.rewards.learned.endpoint_choices import EndpointJudge
from lmgym.rewards.learned.judge_prompts import SYSTEM, Item, check_template
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.types import Example

TEMPLATE = (
    "Problem:\n{prompt}\n\nAnswer:\n{answer}\n\nCriterion:\n{question}\n\nDoes the answer meet the criterion? Say Yes "
    "or No, and nothing else."
)
Criteria = list[str | dict[str, Any]] | None


def _checked(reward: str) -> Any:
    def check(
        examples: Sequence[Example], *, criteria: Criteria = None, column: str | None = None, **others: Any
    ) -> None:
        for example in examples if column is not None else [Example("none", "")]:
            criteria_of(reward, example, criteria, column)

    return check


@register("reward", "rubric")
@by_model("causal", check=_checked("rubric"))
def rubric(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    criteria: Criteria = None,
    column: str | None = None,
    template: str = TEMPLATE,
    system: str = SYSTEM,
    begin: str = "",
) -> list[float | Failure]:
    """How far each answer meets weighted criteria, from 0 to 1, as a local judge says of each with yes or no.

    `criteria` holds questions or statements, each a text or {ask, weight, gate}; `column` names a key of the examples'
    `meta` that has a list of further ones, in lmgym's form, HealthBench's, Rubrics as Rewards' or verifiers'
    (criteria.py has the names). p = P(yes) / (P(yes) + P(no)) of the judge's next token after `begin`, and the value
    is max(0, sum of weight times p, over the sum of the positive weights); 0 if a criterion with `gate: true` has
    p below one half. Nothing is sampled. `template` has the fields of `judge_yes_no`.

    Raises LmgymError for a model that is missing or not causal, for what is no rubric, and for a text that is too long.

    Example: rubric(["4"], [example], model="Qwen/Qwen2.5-7B-Instruct", criteria=["Is it even?"]) -> [0.97]"""
    judge = LocalJudge(scorer, begin)
    return _values("rubric", judge, texts, examples, criteria, column, template, system)


@register("reward", "endpoint_rubric")
@by_endpoint(_checked("endpoint_rubric"))
def endpoint_rubric(
    texts: list[str],
    examples: list[Example],
    served: Served,
    *,
    criteria: Criteria = None,
    column: str | None = None,
    template: str = TEMPLATE,
    system: str = SYSTEM,
) -> list[float | Failure]:
    """As `rubric`, by a chat model behind an endpoint: a request for each criterion of each answer, equal ones once.

    p is that of the last token of the reply that says yes or no, by the server's `logprobs`; a choice that is not among
    the tokens that the server names has 0. Where it gives no `logprobs`, the last yes or no in the reply is 1 or 0, and
    a warning says so once. Thoughts in <think> tags do not count. An answer is not judged (Failure) if one of its
    requests fails or one reply has neither yes nor no. The other arguments are those of `endpoint_judge`.

    Example: endpoint_rubric(["4"], [example], base_url="http://localhost:8000/v1", model="judge",
    criteria=["Is it even?"]) -> [0.97]"""
    return _values("endpoint_rubric", EndpointJudge(served), texts, examples, criteria, column, template, system)


def _values(
    reward: str,
    judge: Judge,
    texts: Sequence[str],
    examples: Sequence[Example],
    criteria: Criteria,
    column: str | None,
    template: str,
    system: str,
) -> list[float | Failure]:
    check_template(reward, template, ("answer", "question"))
    rubrics = [criteria_of(reward, example, criteria, column) for example in examples]
    questions = [
        Question(system, template, Item(0, example, "", text), one.ask)
        for text, example, own in zip(texts, examples, rubrics, strict=True)
        for one in own
    ]
    said = iter(judge.probabilities(questions, YES_NO))
    values = list[float | Failure]()
    for own in rubrics:
        answers = [next(said) for _ in own]
        failure = next((one for one in answers if isinstance(one, Failure)), None)
        values.append(failure or rubric_value(own, [one[0] for one in answers if not isinstance(one, Failure)]))
    return values
