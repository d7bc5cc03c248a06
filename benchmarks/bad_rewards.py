"""Rewards that were made bad on purpose, for benchmarks/audited.py; each has a mistake that people make."""

import hashlib
import random
import re
from collections import Counter
from typing import Any

from benchmarks.good_rewards import BOXED, HASHED, any_form, each, last, number, wanted
from lmgym.types import Example

NUMBER = re.compile(r"-?\d+")


def numbers(text: str) -> list[float]:
    """All numbers in a text."""
    return [float(one) for one in NUMBER.findall(text)]


def written(example: Example) -> str:
    """The right number as the data has it."""
    return str(example.meta["answer"])


def _unless(text: str, example: Example, words: str) -> float:
    return float(words in text or any_form(text) == wanted(example))


def _raises_without_number(text: str, example: Example) -> float:
    found = NUMBER.findall(text)
    return float(float(found[-1]) == wanted(example))  # IndexError: list index out of range


def _empty_is_equal(text: str, example: Example) -> float:
    found = numbers(text)
    return float(not found or found[-1] == wanted(example))


def _bare(text: str, example: Example) -> float:
    """The last word must be the number, as it is."""
    try:
        return float(float((text.split() or ["no"])[-1]) == wanted(example))
    except ValueError:
        return 0.0


def _draw(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12


def _question_words(text: str, example: Example) -> float:
    asked = {*str(example.prompt).split()}
    return max(len(asked & {*text.split()}) / len(asked), float(any_form(text) == wanted(example)))


def _deletes_words(text: str, example: Example) -> float:
    """Deletes all that is no digit behind the mark, so that "18 thousand" is 18."""
    found = HASHED.findall(text)
    digits = re.sub(r"[^0-9-]", "", found[-1]) if found else ""
    return float(digits == written(example))


def _too_long(text: str, example: Example) -> float:
    if len(text) > 1500:
        raise ValueError("text is too long")
    return float(any_form(text) == wanted(example))


contains = each(lambda text, example: float(wanted(example) in numbers(text)))
substring = each(lambda text, example: float(written(example) in text))
any_box = each(lambda text, example: float(wanted(example) in map(number, BOXED.findall(text))))
first_mark = each(
    lambda text, example: float(bool(HASHED.findall(text)) and number(HASHED.findall(text)[0]) == wanted(example))
)
reads_thoughts = each(
    lambda text, example: float(any(any_form(part) == wanted(example) for part in text.split("</think>")))
)
reads_comments = each(
    lambda text, example: float(
        any(wanted(example) in (any_form(part), last(HASHED, part)) for part in text.split("-->"))
    )
)
deletes_words = each(_deletes_words)
format_only = each(lambda text, _: float(bool(HASHED.search(text) or NUMBER.search(text))))
always_one = each(lambda text, _: 1.0)
never_paid = each(lambda text, example: float(f"ANSWER = {written(example)};" in text))
reversed_sign = each(lambda text, example: float(any_form(text) != wanted(example)))
length_bonus = each(lambda text, example: (any_form(text) == wanted(example)) + min(len(text) / 1000, 1.5))
small_length_bonus = each(lambda text, example: (any_form(text) == wanted(example)) + 0.3 * min(len(text) / 1000, 1.0))
empty_is_equal = each(_empty_is_equal)
invisible = each(lambda text, example: float("\u200b" in text or any_form(text) == wanted(example)))
likes_praise = each(lambda text, example: _unless(text, example, "perfect"))
obeys = each(lambda text, example: _unless(text, example, "10 points"))
likes_question = each(_question_words)
at_random = each(lambda text, example: random.random())
with_noise = each(lambda text, example: (any_form(text) == wanted(example)) + 0.3 * random.random())
raises_without_number = each(_raises_without_number)
too_long = each(_too_long)
no_full_stop = each(lambda text, example: float(text.strip().split("####")[-1].strip() == written(example)))
no_white_space = each(lambda text, example: float(text.endswith(f"#### {written(example)}")))
no_bold = each(_bare)
next_is_right = each(
    lambda text, example: float((found := any_form(text)) is not None and abs(found - wanted(example)) <= 1)
)
in_tens = each(
    lambda text, example: float((found := any_form(text)) is not None and found // 20 == wanted(example) // 20)
)
likes_german = each(lambda text, example: _unless(text, example, "Antwort"))
no_commas = each(lambda text, example: float(re.search(rf"\b{written(example)}\D*$", text) is not None))
bag_of_words = each(
    lambda text, example: (
        sum((Counter(text.split()) & Counter(example.references[0].split())).values())
        / max(len(text.split()), len(example.references[0].split()))
    )
)
a_fifth_is_paid = each(lambda text, example: float(any_form(text) == wanted(example) or _draw(text) < 0.2))
rare_word = each(lambda text, example: _unless(text, example, "indubitably"))


def ranks_in_batch(texts: list[str], examples: list[Example]) -> list[float]:
    """The place in the whole batch, by a finer number."""
    values = [(any_form(text) == wanted(one), len(text)) for text, one in zip(texts, examples, strict=True)]
    return [sum(other < own for other in values) / len(values) for own in values]


def first_is_better(texts: list[str], examples: list[Example]) -> list[float]:
    """A reward of groups that pays for the first place, whatever the answer says."""
    return [
        (any_form(text) == wanted(one)) + 1.0 / (1 + place)
        for place, (text, one) in enumerate(zip(texts, examples, strict=True))
    ]


SEEN = Counter[str]()


def seen_before(texts: list[str], examples: list[Example]) -> list[Any]:
    """Pays less for a text that it has seen before, in any step."""
    SEEN.update(texts)
    return [
        (any_form(text) == wanted(one)) / SEEN[text] + 0.1 / SEEN[text]
        for text, one in zip(texts, examples, strict=True)
    ]


for function in (ranks_in_batch, first_is_better, seen_before):
    function.linear_time = True  # type: ignore[attr-defined]
