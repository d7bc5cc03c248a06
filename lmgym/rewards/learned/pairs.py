"""`endpoint_pairs`: a judge behind a chat endpoint compares answers to a prompt in pairs, or each with one champion.

Judges like what stands first, or last. So each pair is asked about in both orders: a judge that looks at nothing but
the place says "tie"."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Judgement
from lmgym.rewards.champions import champion_of
from lmgym.rewards.groups import of_groups
from lmgym.rewards.learned.endpoint import Served, ask_endpoint, by_endpoint
from lmgym.rewards.learned.judge_prompts import check_template
from lmgym.rewards.learned.ranking import SYSTEM, question
from lmgym.rewards.views import without_thinking
from lmgym.stats.bradley_terry import beats, bradley_terry
from lmgym.types import Example

TEMPLATE = "Problem:\n{prompt}\n\n{answer}\n\nWhich solution is better? Answer A, B or TIE, and nothing else."
VERDICT = re.compile(r"\b(?:A|B|TIE|Tie|tie)\b")

Pair = tuple[str, str]
Against = Literal["group", "reference", "champion"]
Order = Literal["both", "first", "second"]


@register("reward", "endpoint_pairs")
@of_groups
@by_endpoint()
def endpoint_pairs(
    texts: list[list[str]],
    examples: list[Example],
    served: Served,
    *,
    against: Against = "group",
    opponents: int | None = None,
    order: Order = "both",
    template: str = TEMPLATE,
    system: str = SYSTEM,
) -> list[list[Judgement]]:
    """How good each answer is, from 0 to 1, as a chat model says of pairs, each asked in both orders.

    against group: the probability to beat another answer of the group, by strengths of Bradley and Terry that fit all
    verdicts (stats/bradley_terry.py). `opponents`: with how many others each answer is compared (default: all), in a
    ring drawn from the example's id and the texts alone. against reference: the share of its comparisons with the
    example's first reference that the answer wins, ties half; their mean is the win rate. against champion: the same
    with the best answer to the prompt so far (champions.py). `order: first` or `second` asks about each pair once, with
    the answer (against reference or champion) in that place.

    Equal answers are shown once and get the same number. A group whose answers are all equal has nothing to compare and
    is not judged (None); an answer without a readable verdict is a Failure. The other arguments are those of
    `endpoint_judge`.

    Example: endpoint_pairs([["4", "5", "4"]], [example], base_url="http://localhost:8000/v1", model="judge")
    -> [[0.75, 0.25, 0.75]]"""
    check_template("endpoint_pairs", template)
    asked = asked_pairs("endpoint_pairs", texts, examples, against, opponents, order)
    questions = [question(system, template, examples[number], order) for number, order in asked]
    replies = served.replies(questions, ask_endpoint)
    said = [reply if isinstance(reply, Failure) else verdict(reply) for reply in replies]
    return pair_values(texts, examples, against, asked, said)


def moves_champion(*, against: Against = "group", **_: Any) -> bool:
    """Whether these arguments of a reward of pairs ask for a moving champion."""
    return against == "champion"


endpoint_pairs.keeps_champion = moves_champion  # type: ignore[attr-defined]


def asked_pairs(
    reward: str,
    texts: Sequence[Sequence[str]],
    examples: Sequence[Example],
    against: Against,
    opponents: int | None,
    order: Order,
) -> list[tuple[int, Pair]]:
    """What to ask a judge: the number of a group, and two of its texts in the order in which they are shown. With
    `order: both` each pair is there in both orders."""
    if opponents is not None and opponents < 1:
        raise LmgymError(f"key 'rewards.{reward}.opponents' must be at least 1, not {opponents}")
    asked: list[tuple[int, Pair]] = []
    for number, (group, example) in enumerate(zip(texts, examples, strict=True)):
        champion = opponent_of(reward, example, against)
        if champion is None:
            pairs = in_group(group, example, opponents)
        else:
            pairs = [(text, champion) for text in sorted(set(group)) if text != champion]
        asked += [(number, (one, other)) for one, other in pairs if order != "second"]
        asked += [(number, (other, one)) for one, other in pairs if order != "first"]
    return asked


def pair_values(
    texts: Sequence[Sequence[str]],
    examples: Sequence[Example],
    against: Against,
    asked: Sequence[tuple[int, Pair]],
    points: Sequence[float | Failure],
) -> list[list[Judgement]]:
    """The numbers of all answers, from what the judge gives the first of each two that it was shown: 1 if that one is
    better, 0 if the second is, or anything between."""
    said: list[dict[Pair, float | Failure]] = [{} for _ in texts]
    for (number, order), point in zip(asked, points, strict=True):
        said[number][order] = point
    values = []
    for group, example, found in zip(texts, examples, said, strict=True):
        champion = opponent_of("pairs", example, against)
        values.append(by_strength(group, found) if champion is None else against_one(group, champion, found))
    return values


def opponent_of(reward: str, example: Example, against: Against) -> str | None:
    """Whom each answer to the example is compared with; None: with the others of its group, as is a group whose prompt
    has no champion yet. Raises LmgymError for an example without a reference, if that is asked for."""
    if against == "group":
        return None
    if against == "champion":
        return champion_of(example)
    if not example.references:
        raise LmgymError(
            f"reward '{reward}' compares with the reference (against: reference), and example '{example.id}' has none; "
            "write against: group, or against: champion"
        )
    return example.references[0]


def in_group(group: Sequence[str], example: Example, opponents: int | None) -> list[Pair]:
    """The pairs of distinct texts to compare: all, or in a shuffled ring each with its nearest neighbours."""
    distinct = sorted(set(group))
    count = len(distinct)
    if opponents is None or opponents >= count - 1:
        return list(combinations(distinct, 2))
    ring = [distinct[place] for place in seeds.permutation(count, "pairs", example.id, *distinct)]
    found = {frozenset((i, (i + step) % count)) for step in range(1, opponents // 2 + 1) for i in range(count)}
    if opponents % 2:  # one more each: half of the ring away; of an odd number of texts one has two more
        found |= {frozenset((i, (i + count // 2) % count)) for i in range((count + 1) // 2)}
    return [(ring[one], ring[other]) for one, other in sorted(map(sorted, found))]


def verdict(reply: str) -> float | Failure:
    """1 if the first of the two is better, 0 if the second is, 0.5 for a tie: the last word of the reply that says so.

    Example: verdict("Both are right, but A is shorter: A") -> 1.0"""
    named = VERDICT.findall(without_thinking(reply))
    if not named:
        return Failure("error", "reward 'endpoint_pairs': the reply says neither A nor B nor TIE")
    return {"A": 1.0, "B": 0.0}.get(named[-1], 0.5)


def by_strength(group: Sequence[str], said: Mapping[Pair, float | Failure]) -> list[Judgement]:
    """Each text's probability to beat another of the group; of verdicts that are missing, the others decide."""
    distinct = sorted(set(group))
    if len(distinct) < 2:
        return [None] * len(group)
    place = {text: number for number, text in enumerate(distinct)}
    wins = [[0.0] * len(distinct) for _ in distinct]
    for (one, other), points in said.items():
        if not isinstance(points, Failure):
            wins[place[one]][place[other]] += points
            wins[place[other]][place[one]] += 1.0 - points
    values = beats(bradley_terry(wins))
    judged = {number for number, row in enumerate(wins) if any(row) or any(other[number] for other in wins)}
    failure = next((one for one in said.values() if isinstance(one, Failure)), None)
    return [values[place[text]] if place[text] in judged else failure for text in group]


def against_one(group: Sequence[str], champion: str, said: Mapping[Pair, float | Failure]) -> list[Judgement]:
    """The share of its comparisons with the champion that each text wins; the champion itself ties."""
    values = dict[str, Judgement]()
    for text in set(group):
        found = [said.get((text, champion)), said.get((champion, text))]
        known = [points if first else 1.0 - points for first, points in zip((True, False), found, strict=True)
                 if not isinstance(points, Failure) and points is not None]  # fmt: skip
        failure = next((one for one in found if isinstance(one, Failure)), None)
        values[text] = 0.5 if text == champion else sum(known) / len(known) if known else failure
    return [values[text] for text in group]
