"""`process_reward_model`: how likely the steps of an answer are right, by a model trained on labelled steps."""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from lmgym.core.errors import LmgymError, represent
from lmgym.core.registry import register
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.rows import Row, clean, length_error
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.text.chat import prompt_ids
from lmgym.text.steps import split_steps, step_ids
from lmgym.types import Example

Aggregate = Literal["min", "product", "last", "mean"]


@register("reward", "process_reward_model")
@by_model("token_classifier")
def process_reward_model(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    aggregate: Aggregate = "min",
    separator: str | None = None,
) -> list[float]:
    """The probabilities that the steps of an answer are right, as one number between 0 and 1: the smallest (`min`),
    their `product`, the `last` or the `mean`. An answer in which no step ends gets 0.

    `model` is a run folder of lmgym's algorithm process_reward_model, or another token classifier with two labels, of
    which the last means right, as TRL's PRMTrainer made them. The answer is cut into steps at the `separator` of the
    model's training; for a model that does not name it, write it here. Of an answer that is too long
    `truncation` cuts tokens at its beginning ("left") or end ("right"); steps whose end is cut do not count.

    Source: the smallest and the product are from Lightman et al. (arXiv 2305.20050, appendix F), the smallest is what
    Wang et al. take (arXiv 2312.08935).

    Raises LmgymError as `reward_model` does, for a model without two labels, and for one of unknown separator.

    Example: process_reward_model(["2+2=4\\n4+1=6"], [Example("a/0", "2+2+1=")], model="runs/prm") -> [0.03]"""
    separator = _separator(scorer, separator)
    rows, ends = [], []
    for text, example in zip(texts, examples, strict=True):
        row, own = _row(scorer, split_steps(clean(text), separator), example, separator)
        rows.append(row)
        ends.append(own)
    logits = iter(batched_forward.token_logits(scorer, [row for row in rows if row is not None]))
    return [
        0.0 if row is None else aggregated(next(logits)[own].softmax(-1)[:, -1].tolist(), aggregate)
        for row, own in zip(rows, ends, strict=True)
    ]


def aggregated(probabilities: Sequence[float], how: Aggregate) -> float:
    """One number for the probabilities of an answer's steps, of which there is one or more."""
    if how == "last":
        return probabilities[-1]
    ways: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "product": math.prod, "mean": statistics.fmean}
    return ways[how](probabilities)


def _separator(scorer: Scorer, given: str | None) -> str:
    """What the model's steps end with. Raises LmgymError where that is unknown, or where the outputs cannot be read."""
    if len(scorer.labels) != 2:
        raise LmgymError(
            f"key 'rewards.process_reward_model.model': {scorer.name} has {len(scorer.labels)} labels "
            f"({', '.join(scorer.labels[:5])}), and 'process_reward_model' needs two, of which the last means right"
        )
    known = scorer.facts.get("separator")
    if known and given not in (None, known):
        raise LmgymError(
            f"key 'rewards.process_reward_model.separator': {scorer.name} was trained with {represent(known)}, not "
            f"{represent(given)}; remove it"
        )
    separator = known or given
    if not separator:
        raise LmgymError(
            f"key 'rewards.process_reward_model.separator': {scorer.name} does not say how its steps were separated; "
            'write it, such as "\\n"'
        )
    return str(separator)


def _row(scorer: Scorer, steps: Sequence[str], example: Example, separator: str) -> tuple[Row | None, list[int]]:
    """The model's input for an answer, and the places where its steps end; no input where no step ends."""
    before = prompt_ids(scorer.tokenizer, example.prompt, scorer.facts.get("template"))
    own, ends = list[int](), list[int]()
    for step in steps:
        own += step_ids(scorer.tokenizer, step, separator)
        ends.append(len(own) - 1)
    room = sys.maxsize if scorer.longest is None else scorer.longest - len(before)
    if own and len(own) > room:
        if scorer.truncation == "refuse":
            raise length_error(scorer, "a prompt with its answer", len(before) + len(own))
        if room < 1:
            raise LmgymError(
                f"reward 'process_reward_model': the prompt of example '{example.id}' has {len(before)} tokens, and "
                f"{scorer.name} reads {scorer.longest}; shorten it, or take a model that reads more"
            )
        first = len(own) - room if scorer.truncation == "left" else 0
        own, ends = own[first : first + room], [end - first for end in ends if first <= end < first + room]
    return (Row((*before, *own)), [len(before) + end for end in ends]) if ends else (None, [])
