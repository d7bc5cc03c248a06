"""`judge_pairs`: a local judge compares answers to a prompt in pairs, or each with the reference, by the probability of
"A" and "B" as its next token."""

from lmgym.core.registry import register
from lmgym.rewards.base import Judgement
from lmgym.rewards.groups import of_groups
from lmgym.rewards.learned.choices import LocalJudge, Question
from lmgym.rewards.learned.judge_prompts import Item, check_template
from lmgym.rewards.learned.pairs import Against, Order, asked_pairs, moves_champion, pair_values
from lmgym.rewards.learned.ranking import SYSTEM, lettered
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.types import Example

TEMPLATE = "Problem:\n{prompt}\n\n{answer}\n\nWhich solution is better? Say A or B, and nothing else."


@register("reward", "judge_pairs")
@of_groups
@by_model("causal", cuts=False)
def judge_pairs(
    texts: list[list[str]],
    examples: list[Example],
    scorer: Scorer,
    *,
    against: Against = "group",
    opponents: int | None = None,
    order: Order = "both",
    template: str = TEMPLATE,
    system: str = SYSTEM,
    begin: str = "",
) -> list[list[Judgement]]:
    """As `endpoint_pairs`, by a local judge: the first of two answers gets the points P(A) / (P(A) + P(B)) of the
    judge's next token after `begin`, and each pair is asked about in both orders. Nothing is sampled.

    Raises LmgymError for a model that is missing or not causal, and for two answers that are too long to be read
    together.

    Example: judge_pairs([["4", "5", "4"]], [example], model="Qwen/Qwen2.5-7B-Instruct") -> [[0.71, 0.29, 0.71]]"""
    check_template("judge_pairs", template)
    asked = asked_pairs("judge_pairs", texts, examples, against, opponents, order)
    judge = LocalJudge(scorer, begin, cuts=False)
    questions = [Question(system, template, Item(0, examples[number], "", lettered(order))) for number, order in asked]
    points = [shares[0] for shares in judge.probabilities(questions, (("A",), ("B",)))]
    return pair_values(texts, examples, against, asked, points)


judge_pairs.keeps_champion = moves_champion  # type: ignore[attr-defined]
