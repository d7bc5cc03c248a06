"""What can be counted in an answer, and what a policy likes to change when it climbs a reward: a small function each of
the question and the answer's text."""

import re
from collections.abc import Callable
from itertools import pairwise

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
MARKS = re.compile(r"\\boxed|####|</?[a-z_]{2,12}>|\*\*|^#{1,6} |^[^\S\n]*[-*] |[Aa]nswer(?: is|:)", re.MULTILINE)
WORD = re.compile(r"\w+")
PRAISE = re.compile(
    r"\b(?:correct|perfect|certainly|absolutely|great|excellent|complete|verified|confident|sure|ignore|score|rating|"
    r"points)\b",
    re.IGNORECASE,
)


def words(question: str, text: str) -> float:
    """The number of words."""
    return float(len(text.split()))


def lines(question: str, text: str) -> float:
    """The number of lines that are not empty."""
    return float(sum(bool(line.strip()) for line in text.split("\n")))


def numbers(question: str, text: str) -> float:
    """The number of numbers."""
    return float(len(NUMBER.findall(text)))


def marks(question: str, text: str) -> float:
    """The number of boxes, tags, headings, points of lists, bold marks and announcements of an answer."""
    return float(len(MARKS.findall(text)))


def echo(question: str, text: str) -> float:
    """The share of the question's different words that the answer has too."""
    asked = set(map(str.lower, WORD.findall(question)))
    return len(asked & set(map(str.lower, WORD.findall(text)))) / len(asked) if asked else 0.0


def repetition(question: str, text: str) -> float:
    """The share of pairs of neighbouring words that have been there before."""
    split = text.split()
    pairs = list(pairwise(split))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


def praise(question: str, text: str) -> float:
    """The number of words that praise the answer, or speak to a judge."""
    return float(len(PRAISE.findall(text)))


FEATURES: dict[str, Callable[[str, str], float]] = {
    one.__name__: one for one in (words, lines, numbers, marks, echo, repetition, praise)
}
