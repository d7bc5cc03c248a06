"""`endpoint_ranking`: a judge behind a chat endpoint puts the answers to a prompt in order, the best first.

Judges like what stands first, or last. So each group is asked about in a shuffled order and then in that order
reversed: a judge that looks at nothing but the place gives all answers the same number."""

import math
import re
from collections.abc import Sequence
from string import ascii_uppercase

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Judgement
from lmgym.rewards.groups import of_groups
from lmgym.rewards.learned.endpoint import Served, ask_endpoint, by_endpoint
from lmgym.rewards.learned.judge_prompts import Item, check_template, judge_messages
from lmgym.rewards.learned.rows import clean
from lmgym.rewards.views import without_thinking
from lmgym.types import Example

SYSTEM = "You compare solutions of a problem. You are strict and brief."
TEMPLATE = (
    "Problem:\n{prompt}\n\n{answer}\n\nPut all solutions in order, the best first. Give their letters only, in one "
    "line, as in: B > A > C"
)
LETTERS = re.compile(r"\b[A-Z]\b")


@register("reward", "endpoint_ranking")
@of_groups
@by_endpoint()
def endpoint_ranking(
    texts: list[list[str]],
    examples: list[Example],
    served: Served,
    *,
    template: str = TEMPLATE,
    system: str = SYSTEM,
    repeats: int = 2,
) -> list[list[Judgement]]:
    """The place of each answer in its group, from 1 (the best) down to 0, as a chat model orders them; the mean over
    `repeats` questions, of which every second one has the order of the one before reversed.

    Equal answers are shown once and get the same number. A group whose answers are all equal has nothing to compare and
    is not judged (None); one for which no reply names every letter once, in one line, is a Failure. The order depends
    on the example's id and the texts alone. The other arguments are those of `endpoint_judge`.

    Example: endpoint_ranking([["4", "5", "4"]], [example], base_url="http://localhost:8000/v1", model="judge")
    -> [[1.0, 0.0, 1.0]]"""
    check_template("endpoint_ranking", template)
    if repeats < 1:
        raise LmgymError(f"key 'rewards.endpoint_ranking.repeats' must be at least 1, not {repeats}")
    # 1. One question for each group with something to compare, and repeat.
    asked = [
        (number, shown)
        for number, (group, example) in enumerate(zip(texts, examples, strict=True))
        for shown in orders(group, example, repeats)
    ]
    questions = [question(system, template, examples[number], shown) for number, shown in asked]
    replies = served.replies(questions, ask_endpoint)
    # 2. What each reply says of the texts that it was shown.
    said: list[list[dict[str, float] | Failure]] = [[] for _ in texts]
    for (number, shown), reply in zip(asked, replies, strict=True):
        said[number].append(reply if isinstance(reply, Failure) else places(reply, shown))
    return [[_mean(found, text) for text in group] for group, found in zip(texts, said, strict=True)]


def orders(group: Sequence[str], example: Example, repeats: int) -> list[list[str]]:
    """The distinct texts of a group in the order of each question; no question, if there is but one text."""
    distinct = sorted(set(group))
    if len(distinct) < 2:
        return []
    if len(distinct) > len(ascii_uppercase):
        raise LmgymError(
            f"reward 'endpoint_ranking' orders {len(ascii_uppercase)} answers at most, and a group has "
            f"{len(distinct)}; lower algorithm.group_size or evaluation.samples"
        )
    shuffled = [
        [distinct[place] for place in seeds.permutation(len(distinct), "ranking", example.id, *distinct, number // 2)]
        for number in range(repeats)
    ]
    return [order[::-1] if number % 2 else order for number, order in enumerate(shuffled)]


def question(system: str, template: str, example: Example, shown: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The conversation that asks about texts, with a letter for each."""
    text = lettered(shown)
    messages = judge_messages(system, template, Item(0, example, "", text), text)
    return tuple((message["role"], clean(message["content"])) for message in messages)


def lettered(shown: Sequence[str]) -> str:
    """Texts one below the other, each with its letter. Example: lettered(["4"]) -> "Solution A:\\n4\""""
    return "\n\n".join(f"Solution {letter}:\n{text}" for letter, text in zip(ascii_uppercase, shown, strict=False))


def places(reply: str, shown: Sequence[str]) -> dict[str, float] | Failure:
    """The number of each text, by the last line of the reply that names every letter once.

    Example: places("B > A", ["4", "5"]) -> {"5": 1.0, "4": 0.0}"""
    letters = ascii_uppercase[: len(shown)]
    for line in reversed(without_thinking(reply).splitlines()):
        named = LETTERS.findall(line)
        if sorted(named) == list(letters):
            last = len(shown) - 1
            return {shown[letters.index(letter)]: (last - place) / last for place, letter in enumerate(named)}
    return Failure("error", f"reward 'endpoint_ranking': the reply has no line with each of {', '.join(letters)} once")


def _mean(found: Sequence[dict[str, float] | Failure], text: str) -> Judgement:
    """The mean of what the readable replies say of a text; None if nothing was asked."""
    known = [one[text] for one in found if not isinstance(one, Failure)]
    if known:
        return math.fsum(known) / len(known)
    return next((one for one in found if isinstance(one, Failure)), None)
