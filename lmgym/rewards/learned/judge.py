"""LLM judges that run locally: `judge_score` asks for a number, `judge_yes_no` for yes or no. Nothing is sampled: the
value is computed from the distribution of the judge's next token."""

import math
from collections.abc import Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import episodes as of_episodes
from lmgym.rewards.learned.choices import single_tokens, word_probabilities
from lmgym.rewards.learned.judge_prompts import (
    QUESTION_TEMPLATE,
    QUESTIONS,
    SCORE_TEMPLATE,
    SYSTEM,
    Item,
    Per,
    check_template,
    items_of,
    judge_messages,
)
from lmgym.rewards.learned.rows import Row, chat_ids, fitted
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.types import Episode, Example


def _check_judge(examples: Sequence[Example], *, correct_is_one: bool = False, **arguments: Any) -> None:
    if correct_is_one:
        final_answer([""] * len(examples), list(examples))  # raises for examples without references


@register("reward", "judge_score")
@of_episodes
@by_model("causal", check=_check_judge)
def judge_score(
    episodes: list[Episode],
    scorer: Scorer,
    *,
    template: str = SCORE_TEMPLATE,
    system: str = SYSTEM,
    begin: str = "Score (from 1 to 10):",
    highest: int = 10,
    correct_is_one: bool = False,
    per: Per = "answer",
) -> list[float]:
    """The expected value of the judge's number from 1 to `highest`, divided by `highest`. The probabilities are those
    of the judge's next token, renormalised over these numbers.

    `template` is the user message to the judge; its fields are {prompt}, {answer}, {before} (the text before an action)
    and {reference} (the first reference). `system` is the system message; empty: none. The judge's reply starts with
    `begin`, and the number is its next token. The number counts with and without a leading space, unless `begin` ends
    in a space.

    With `per: turn` each action of an environment such as `stepwise` is judged, and the reward is the mean over the
    episode's actions. `per: last` judges the last action only. With `correct_is_one`, a text that announces the
    reference's final answer (`final_answer`, strict) gets 1 and is not judged. `truncation` cuts the answer, never the
    text around it.
    Source: LLM_RL's StepwiseVerbalRewardModel, whose `begin` ends in a space.

    Raises LmgymError for a model that is missing or not causal, an unknown field, a number that is not a single token
    (often 10: write `highest: 9`), and a text that is too long; with `correct_is_one` for an example without
    references.

    Example: a judge that gives 6 and 10 the same probability:
    judge_score(episodes, model="meta-llama/Llama-3.1-8B-Instruct") -> [0.8]"""
    check_template("judge_score", template)
    if highest < 2:
        raise LmgymError(f"key 'rewards.judge_score.highest' must be at least 2, not {highest}")
    words = [_tokens(scorer, "highest", begin, str(number)) for number in range(1, highest + 1)]
    items = items_of(episodes, per)
    right = [correct_is_one and item.correct for item in items]
    asked = [item for item, known in zip(items, right, strict=True) if not known]
    rows = [_row(scorer, system, template, item, "", begin) for item in asked]
    judged = iter(
        math.fsum(number * p for number, p in enumerate(probabilities, start=1)) / highest
        for probabilities in word_probabilities(scorer, rows, words)
    )
    scores = [1.0 if known else next(judged) for known in right]
    return _means(episodes, items, scores)


@register("reward", "judge_yes_no")
@of_episodes
@by_model("causal", check=_check_judge)
def judge_yes_no(
    episodes: list[Episode],
    scorer: Scorer,
    *,
    questions: Sequence[str] = QUESTIONS,
    template: str = QUESTION_TEMPLATE,
    system: str = SYSTEM,
    begin: str = "",
    yes: str = "Yes",
    no: str = "No",
    correct_is_one: bool = False,
    per: Per = "answer",
) -> list[float]:
    """P(yes) / (P(yes) + P(no)) of the judge's next token, averaged over the questions.

    The default questions are about added value, progress and soundness. `template` also has the field {question}; all
    else is as for `judge_score`. With `correct_is_one`, a text that announces the reference's final answer
    (`final_answer`, strict) gets 1 and is not judged. Source: LLM_RL's StepwiseMultiDimensionVerbalRewardModel.

    Raises LmgymError as `judge_score` does, and with `correct_is_one` for an example without references.

    Example: judge_yes_no(episodes, model="Qwen/Qwen2.5-7B-Instruct", questions=["Is the answer polite?"]) -> [0.93]"""
    check_template("judge_yes_no", template, ("answer", "question"))
    if isinstance(questions, str) or not questions:
        raise LmgymError("key 'rewards.judge_yes_no.questions' must be a list of at least one question")
    words = [_tokens(scorer, key, begin, word) for key, word in (("yes", yes), ("no", no))]
    items = items_of(episodes, per)
    # One row per item and question; items that are known to be right have none.
    right = [correct_is_one and item.correct for item in items]
    rows = [
        _row(scorer, system, template, item, question, begin)
        for item, known in zip(items, right, strict=True)
        for question in (() if known else questions)
    ]
    yes_no = iter(word_probabilities(scorer, rows, words))
    scores = [1.0 if known else math.fsum(next(yes_no)[0] for _ in questions) / len(questions) for known in right]
    return _means(episodes, items, scores)


def _row(scorer: Scorer, system: str, template: str, item: Item, question: str, begin: str) -> Row:
    def rendered(answer: str) -> list[int]:
        return chat_ids(scorer, judge_messages(system, template, item, answer, question), begin=begin)

    return fitted(scorer, item.answer, rendered)


def _tokens(scorer: Scorer, key: str, begin: str, word: str) -> list[int]:
    """The single tokens that continue `begin` with this word."""
    tokens = single_tokens(scorer, begin, word)
    if not tokens:
        raise LmgymError(
            f"key 'rewards.{scorer.reward}.{key}': '{word}' is no single token of {scorer.name} after "
            f"{begin or chr(10)!r}; choose {'a smaller number' if key == 'highest' else 'another word'}"
        )
    return tokens


def _means(episodes: Sequence[Episode], items: Sequence[Item], scores: Sequence[float]) -> list[float]:
    """One number per episode: the mean over its items; 0 for an episode without items."""
    by_episode: list[list[float]] = [[] for _ in episodes]
    for item, score in zip(items, scores, strict=True):
        by_episode[item.index].append(score)
    return [math.fsum(values) / len(values) if values else 0.0 for values in by_episode]
