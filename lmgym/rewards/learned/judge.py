"""A language model as judge: what it would say next, asked for a score or for a yes or no. Nothing is sampled: the
number is read from the distribution of the judge's next token."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import episodes as of_episodes
from lmgym.rewards.learned import batched_forward
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
from lmgym.rewards.learned.rows import Row, Truncation, chat_ids, fitted, plain_ids
from lmgym.rewards.learned.scorers import Compute, Device, Scorer, load_scorer
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.types import Episode, Example


@register("reward", "judge_score")
@of_episodes
def judge_score(
    episodes: list[Episode],
    *,
    model: str,
    template: str = SCORE_TEMPLATE,
    system: str = SYSTEM,
    begin: str = "Score (from 1 to 10):",
    highest: int = 10,
    per: Per = "answer",
    truncation: Truncation = "refuse",
    revision: str | None = None,
    device: Device = "auto",
    compute: Compute = "float32",
    tokens_per_forward: int = 16384,
) -> list[float]:
    """The expected number from 1 to `highest` under the judge's next token, these numbers alone, over `highest`.

    `template` is the message to the judge, with {prompt}, {answer}, {before} and {reference} in it (the first
    reference); `system` the one before it, left out where it is empty. The judge's own answer starts with `begin`; a
    number behind it counts with and without a space in front, unless `begin` itself ends in one. With `per` turn each
    action of an environment like `stepwise` is judged, {before} being what stands before it, and the number is the mean
    over the episode's actions. `truncation` cuts the answer, never what is around it. Source: LLM_RL's
    StepwiseVerbalRewardModel, whose `begin` ends in a space.

    Raises LmgymError for a model that is not there or is no causal one, an unknown field, a number that is no single
    token (10, often: write `highest: 9`), and what is too long.

    Example: a judge that is torn between 6 and 10
        >>> judge_score(episodes, model="meta-llama/Llama-3.1-8B-Instruct")
        [0.8]
    """
    scorer = load_scorer("judge_score", "causal", model, revision, device, compute)
    check_template("judge_score", template)
    if highest < 2:
        raise LmgymError(f"key 'rewards.judge_score.highest' must be at least 2, not {highest}")
    words = [_tokens("judge_score", "highest", scorer, begin, str(number)) for number in range(1, highest + 1)]
    items = items_of(episodes, per)
    rows = [_row("judge_score", scorer, system, template, item, "", begin, truncation) for item in items]
    shares = _shares(scorer, rows, words, tokens_per_forward)
    scores = [math.fsum((index + 1) * share for index, share in enumerate(one)) / highest for one in shares]
    return _means(episodes, items, scores)


@register("reward", "judge_yes_no")
@of_episodes
def judge_yes_no(
    episodes: list[Episode],
    *,
    model: str,
    questions: Sequence[str] = QUESTIONS,
    template: str = QUESTION_TEMPLATE,
    system: str = SYSTEM,
    begin: str = "",
    yes: str = "Yes",
    no: str = "No",
    correct_is_one: bool = False,
    per: Per = "answer",
    truncation: Truncation = "refuse",
    revision: str | None = None,
    device: Device = "auto",
    compute: Compute = "float32",
    tokens_per_forward: int = 16384,
) -> list[float]:
    """P(yes) / (P(yes) + P(no)) under the judge's next token, the mean over the questions.

    The default questions are of three kinds: added value, progression, soundness. `template` has {question}
    where one of them is to stand; the rest is as for `judge_score`. With `correct_is_one` what announces the
    reference's final answer (`final_answer`, strict) gets 1 without being judged. Source: LLM_RL's
    StepwiseMultiDimensionVerbalRewardModel.

    Raises LmgymError as `judge_score` does, and with `correct_is_one` for an example without references.

    Example:
        >>> judge_yes_no(episodes, model="Qwen/Qwen2.5-7B-Instruct", questions=["Is the answer polite?"])
        [0.93]
    """
    scorer = load_scorer("judge_yes_no", "causal", model, revision, device, compute)
    check_template("judge_yes_no", template, ("answer", "question"))
    if isinstance(questions, str) or not questions:
        raise LmgymError("key 'rewards.judge_yes_no.questions' must be a list of at least one question")
    words = [_tokens("judge_yes_no", key, scorer, begin, word) for key, word in (("yes", yes), ("no", no))]
    items = items_of(episodes, per)
    right = [correct_is_one and item.correct for item in items]
    rows = [
        _row("judge_yes_no", scorer, system, template, item, question, begin, truncation)
        for item, known in zip(items, right, strict=True)
        for question in (() if known else questions)
    ]
    said = iter(_shares(scorer, rows, words, tokens_per_forward))
    scores = [1.0 if known else math.fsum(next(said)[0] for _ in questions) / len(questions) for known in right]
    return _means(episodes, items, scores)


def _check(function: Callable[..., list[float]]) -> Callable[..., None]:
    """The model is there and its tokenizer has what is asked for, before anything is trained."""

    def check(examples: Sequence[Example], **arguments: Any) -> None:
        if arguments.get("correct_is_one"):
            final_answer([""] * len(examples), list(examples))  # which refuses examples without references
        function([], **arguments)

    return check


judge_score.check = _check(judge_score)  # type: ignore[attr-defined]  # see base.check_examples
judge_yes_no.check = _check(judge_yes_no)  # type: ignore[attr-defined]


def _row(
    reward: str,
    scorer: Scorer,
    system: str,
    template: str,
    item: Item,
    question: str,
    begin: str,
    truncation: Truncation,
) -> Row:
    def rendered(answer: str) -> list[int]:
        return chat_ids(scorer, judge_messages(system, template, item, answer, question), begin=begin)

    return fitted(reward, scorer, item.answer, rendered, truncation)


def _tokens(reward: str, key: str, scorer: Scorer, begin: str, word: str) -> list[int]:
    """The tokens that say this word behind `begin`, with a space in front too where there is none yet."""
    anchor = begin or "\n"
    before = plain_ids(scorer.tokenizer, anchor)
    found = []
    for said in (word,) if begin[-1:].isspace() else (word, f" {word}"):
        ids = plain_ids(scorer.tokenizer, anchor + said)
        if ids[:-1] == before and ids[-1] not in found:
            found.append(ids[-1])
    alone = plain_ids(scorer.tokenizer, word)
    if not found and len(alone) == 1:  # "Score: " and "1" read together would end in the token " 1"
        return alone
    if not found:
        raise LmgymError(
            f"key 'rewards.{reward}.{key}': '{word}' is no single token of {scorer.name} behind {anchor!r}; choose "
            f"{'a smaller number' if key == 'highest' else 'another word'}"
        )
    return found


def _shares(scorer: Scorer, rows: Sequence[Row], words: Sequence[list[int]], budget: int) -> list[list[float]]:
    """For each row the probability of each word as the next, of these words alone; they add up to 1."""
    flat = [token for tokens in words for token in tokens]
    shares = []
    for logprobs in batched_forward.next_logprobs(scorer, rows, budget, flat):
        most = max(logprobs)
        likely = iter([math.exp(value - most) for value in logprobs])
        own = [math.fsum(next(likely) for _ in tokens) for tokens in words]
        shares.append([value / math.fsum(own) for value in own])
    return shares


def _means(episodes: Sequence[Episode], items: Sequence[Item], scores: Sequence[float]) -> list[float]:
    """One number per episode, the mean over what of it was judged; 0 for one without any action."""
    own: list[list[float]] = [[] for _ in episodes]
    for item, score in zip(items, scores, strict=True):
        own[item.index].append(score)
    return [math.fsum(values) / len(values) if values else 0.0 for values in own]
