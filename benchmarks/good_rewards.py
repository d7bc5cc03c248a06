"""Rewards as they should be, for benchmarks/audited.py: what `lmgym audit` finds here are false alarms."""

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from lmgym.rewards.groups import of_groups
from lmgym.types import Example

Reward = Callable[..., list[Any]]
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HASHED = re.compile(r"####(.*)")
SAID = re.compile(r"answer is:?(.*)", re.IGNORECASE)


def number(text: str) -> float | None:
    """A text that is one number and decoration: bold, a box, dollars, thousands, a full stop."""
    text = text.strip().rstrip(".").replace("**", "").replace("$", "")
    text = BOXED.sub(r"\1", text).replace(",", "").strip()
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def last(pattern: re.Pattern[str], text: str) -> float | None:
    """The number that the last match of a pattern announces."""
    found = pattern.findall(text)
    return number(found[-1]) if found else None


def wanted(example: Example) -> float:
    """The right number."""
    return float(example.meta["answer"])


def each(value: Callable[[str, Example], Any]) -> Reward:
    """A reward of a function of one text and its example."""

    def reward(texts: list[str], examples: list[Example]) -> list[Any]:
        return [value(text, example) for text, example in zip(texts, examples, strict=True)]

    reward.linear_time = True  # type: ignore[attr-defined]
    return reward


def verifier(pattern: re.Pattern[str]) -> Reward:
    """1 if the last announcement of this form is right."""
    return each(lambda text, example: float(last(pattern, text) == wanted(example)))


def any_form(text: str) -> float | None:
    """The number in the last line, in any form."""
    line = (text.strip().splitlines() or [""])[-1]
    for pattern in (HASHED, TAGGED, BOXED, SAID):
        if pattern.search(line):
            return last(pattern, line)
    return number(line)


def judge(noise: float, right: float = 0.8, wrong: float = 0.2) -> Reward:
    """A judge that mostly knows what is right; its noise depends on the text alone, as a local judge's does."""

    def value(text: str, example: Example) -> float:
        drawn = int(hashlib.sha256((example.id + text).encode()).hexdigest()[:12], 16) / 16**12
        middle = right if any_form(text) == wanted(example) else wrong
        return min(max(middle + noise * NormalDist().inv_cdf(min(max(drawn, 1e-9), 1 - 1e-9)), 0.0), 1.0)

    return each(value)


def overlap(text: str, example: Example, size: int = 2) -> float:
    """F1 of runs of words."""
    one, other = (
        Counter(zip(*(words[start:] for start in range(size)), strict=False))
        for words in (text.split(), example.references[0].split())
    )
    common = sum((one & other).values())
    return 2 * common / max(sum(one.values()) + sum(other.values()), 1)


def similar(text: str, example: Example) -> float:
    """How like the texts are, character by character."""
    return difflib.SequenceMatcher(None, text[:2000], example.references[0], autojunk=False).ratio()


def common_words(text: str, example: Example) -> float:
    """F1 of the longest common subsequence of words."""
    one, other = text.split()[:400], example.references[0].split()
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, wanted_word in enumerate(other, start=1):
            before, row[place] = row[place], before + 1 if word == wanted_word else max(row[place], row[place - 1])
    return 2 * row[-1] / max(len(one) + len(other), 1)


@of_groups
def right_before_wrong(texts: list[list[str]], examples: list[Example]) -> list[list[float]]:
    """The share of the group that is not better."""
    found = []
    for group, example in zip(texts, examples, strict=True):
        values = [float(any_form(text) == wanted(example)) for text in group]
        found.append([sum(other <= own for other in values) / len(values) for own in values])
    return found


right_before_wrong.linear_time = True  # type: ignore[attr-defined]


def _signed(silent: float) -> Reward:
    def value(text: str, example: Example) -> float:
        found = any_form(text)
        return silent if found is None else 1.0 if found == wanted(example) else -1.0

    return each(value)


def _abstains(text: str, example: Example) -> float | None:
    found = any_form(text)
    return None if found is None else float(found == wanted(example))


def _near(text: str, example: Example) -> float:
    found = any_form(text)
    return 0.0 if found is None else math.exp(-abs(found - wanted(example)))


def _letter(text: str, example: Example) -> float:
    found = re.search(r"(?:answer is|####)?\W*\b([A-D])\b\W*$", text.strip())
    return float(found is not None and found[1] == example.meta["answer"] and len(re.findall(r"\b[A-D]\b", text)) == 1)


def _distinct(text: str) -> float:
    words = text.split()
    return len({*words}) / max(len(words), 1)


right = each(lambda text, example: float(any_form(text) == wanted(example)))
in_box, in_tags, behind_hashes, behind_words = map(verifier, (BOXED, TAGGED, HASHED, SAID))
last_line = each(lambda text, example: float(number((text.strip().splitlines() or [""])[-1]) == wanted(example)))
thought_and_answer = each(
    lambda text, example: float(
        re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", text, re.DOTALL) is not None
        and last(TAGGED, text) == wanted(example)
    )
)
near = each(_near)
format_and_right = each(
    lambda text, example: 0.1 * (any_form(text) is not None) + 0.9 * (any_form(text) == wanted(example))
)
signed, signed_or_silent = _signed(-1.0), _signed(0.0)
abstains = each(_abstains)
sure_judge, judge_with_noise, noisy_judge = judge(0.1), judge(0.2), judge(0.3)
brief_and_right = each(lambda text, example: (any_form(text) == wanted(example)) - 0.05 * min(len(text) / 2000, 1.0))
target_length = each(lambda text, _: max(0.0, 1 - abs(len(text.split()) - 30) / 30))
pattern = each(lambda text, _: float(re.search(r"\d\s*$", text) is not None))
no_repetition = each(lambda text, _: _distinct(text))
plain_letters = each(lambda text, _: sum(map(str.isascii, text)) / max(len(text), 1))
sentences = each(lambda text, _: min(text.count(".") / 5, 1.0))
kind_words = each(lambda text, _: min(sum(map(text.lower().count, ("thank", "please", "hope"))) / 3, 1.0))
two_words, longest_common, like, the_same = (
    each(overlap), each(common_words), each(similar),
    each(lambda text, example: float(text.strip() == example.references[0].strip())),
)  # fmt: skip
letter = each(_letter)
