"""ROUGE: runs of words, and longest common subsequences.

The numbers are those of the library rouge-score. The code is our own for its speed: measured in turn with rouge-score
0.1.2, ROUGE-1 took 9 to 13 times less CPU time, ROUGE-L 12 to 22 times and ROUGE-Lsum 8 to 9 times, on CommonGen,
CNN/DailyMail and German news.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from lmgym.core.registry import register
from lmgym.rewards.text.references import grams, in_common, reference_check, references_of, stem
from lmgym.types import Example

Which = Literal["best", "first"]
WORD = re.compile(r"[a-z0-9]+")
Words = list[str]
Kind = Callable[[Any, Any], float]  # the F1 of a reference and a text, as words or as lines of words


@register("reward", "rouge1")
def rouge1(
    texts: list[str], examples: list[Example], *, stemmer: bool = True, references: Which = "best"
) -> list[float]:
    """ROUGE-1: F1 of the words in common with a reference, from 0 to 1.

    Words are runs of the letters a-z and digits in lower case, so a text in another alphabet has none and gets 0; with
    `stemmer` those of four letters and more are cut to Porter's stem. Of several references the one with the highest
    F1 counts; "first" looks at the first only (RL4LMs' default). The corpus value is the mean.
    Sources: Lin 2004; the library rouge-score. Extra `metrics`, unless stemmer is false.

    Raises LmgymError for an example without references.

    Example:
        >>> rouge1(["The cats sat."], [Example("a/0", "?", references=("A cat sat down",))])     # P 2/3, R 2/4
        [0.5714285714285715]
    """
    return _scored("rouge1", texts, examples, stemmer, references, [partial(_gram_f1, n=1)])


@register("reward", "rouge2")
def rouge2(
    texts: list[str], examples: list[Example], *, stemmer: bool = True, references: Which = "best"
) -> list[float]:
    """ROUGE-2: F1 of the pairs of neighbouring words in common with a reference; see rouge1.

    Example:
        >>> rouge2(["the cat sat"], [Example("a/0", "?", references=("the cat ran",))])
        [0.5]
    """
    return _scored("rouge2", texts, examples, stemmer, references, [partial(_gram_f1, n=2)])


@register("reward", "rougeL")
def rougeL(
    texts: list[str], examples: list[Example], *, stemmer: bool = True, references: Which = "best"
) -> list[float]:
    """ROUGE-L: F1 from the longest common subsequence of words with a reference; see rouge1.

    Example:
        >>> rougeL(["the cat sat down"], [Example("a/0", "?", references=("the dog sat",))])     # 2 words: P 2/4, R 2/3
        [0.5714285714285715]
    """
    return _scored("rougeL", texts, examples, stemmer, references, [_sequence_f1])


@register("reward", "rougeLsum")
def rougeLsum(
    texts: list[str], examples: list[Example], *, stemmer: bool = True, references: Which = "best"
) -> list[float]:
    """ROUGE-L of summaries: lines are sentences, and a word of the reference counts if it is in the longest common
    subsequence of its sentence with any sentence of the text (no word more often than it occurs in both); see rouge1.

    Example:
        >>> rougeLsum(["c d\\na b"], [Example("a/0", "?", references=("a b\\nc d",))])     # rougeL: 0.5
        [1.0]
    """
    return _scored("rougeLsum", texts, examples, stemmer, references, [_summary_f1], lines=True)


@register("reward", "rouge_combined")
def rouge_combined(
    texts: list[str], examples: list[Example], *, stemmer: bool = True, references: Which = "best"
) -> list[float]:
    """The mean of ROUGE-1, ROUGE-2 and ROUGE-L, each from its best reference; see rouge1. Source: RL4LMs, which looks
    at the first reference only.

    Example:
        >>> rouge_combined(["the cat sat"], [Example("a/0", "?", references=("the cat ran",))])  # (2/3 + 1/2 + 2/3) / 3
        [0.611111111111111]
    """
    kinds: list[Kind] = [partial(_gram_f1, n=1), partial(_gram_f1, n=2), _sequence_f1]
    return _scored("rouge_combined", texts, examples, stemmer, references, kinds)


@register("reward", "rouge_l_max")
def rouge_l_max(texts: list[str], examples: list[Example], *, stemmer: bool = True) -> list[float]:
    """The highest ROUGE-L over the references; NarrativeQA's metric (UnifiedQA, RL4LMs). The same as rougeL, under
    the name that results are reported by.

    Those compute it with the library py-rouge, which splits words in another way, so the third digit may differ.

    Example:
        >>> rouge_l_max(["in a house"], [Example("a/0", "?", references=("at home", "the house"))])     # P 1/3, R 1/2
        [0.4]
    """
    return _scored("rouge_l_max", texts, examples, stemmer, "best", [_sequence_f1])


def _check(reward: str) -> Callable[..., None]:
    def check(examples: Sequence[Example], *, stemmer: bool = True, **arguments: Any) -> None:
        reference_check(reward, *(["nltk.stem.porter"] if stemmer else []))(examples)

    return check


for _function in (rouge1, rouge2, rougeL, rougeLsum, rouge_combined, rouge_l_max):
    _function.check = _check(_function.__name__)  # type: ignore[attr-defined]


def _scored(
    reward: str,
    texts: Sequence[str],
    examples: Sequence[Example],
    stemmer: bool,
    which: Which,
    kinds: Sequence[Kind],
    lines: bool = False,
) -> list[float]:
    """For each text the mean over `kinds` of the best F1 over its references."""
    known: dict[str, Words | list[Words]] = {}

    def read(text: str) -> Words | list[Words]:
        if not lines:
            return rouge_words(text, stemmer)
        return [rouge_words(line, stemmer) for line in text.split("\n") if line]

    values = []
    for text, references in zip(texts, references_of(reward, examples), strict=True):
        if which == "first":
            references = references[:1]
        for reference in references:
            if reference not in known:
                known[reference] = read(reference)
        answer = read(text)
        best = [max(kind(known[reference], answer) for reference in references) for kind in kinds]
        values.append(sum(best) / len(best))
    return values


def rouge_words(text: str, stemmer: bool) -> Words:
    """Runs of a-z and 0-9 in lower case; with `stemmer`, words of four letters and more as Porter's stem.

    Example:
        >>> split_words("Fields, 7 caf\\u00e9s", True)
        ['field', '7', 'caf', 's']
    """
    words = WORD.findall(text.lower())
    return [stem(word) if len(word) > 3 else word for word in words] if stemmer else words


def _f1(common: int, reference: int, text: int) -> float:
    if not common:
        return 0.0
    precision, recall = common / text, common / reference
    return 2 * precision * recall / (precision + recall)


def _gram_f1(reference: Words, text: Words, n: int) -> float:
    wanted, found = grams(reference, n), grams(text, n)
    return _f1(in_common(wanted, found), max(len(reference) - n + 1, 0), max(len(text) - n + 1, 0))


def _sequence_f1(reference: Words, text: Words) -> float:
    if not reference or not text:
        return 0.0
    return _f1(common_length(reference, text), len(reference), len(text))


def _summary_f1(reference: list[Words], text: list[Words]) -> float:
    left = Counter(word for line in text for word in line)
    wanted = Counter(word for line in reference for word in line)
    size, wanted_size = left.total(), wanted.total()
    hits = 0
    lines = dict.fromkeys(map(tuple, text))
    for sentence in reference:
        union = {index for line in lines for index in _common_indices(sentence, line)}
        for index in sorted(union):
            word = sentence[index]
            if left[word] > 0 and wanted[word] > 0:
                hits += 1
                left[word] -= 1
                wanted[word] -= 1
    return _f1(hits, wanted_size, size)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    Example:
        >>> common_length(["a", "b", "c"], ["b", "x", "c"])
        2
    """
    return len(other) - _rows(one, other)[-1].bit_count()


def _rows(reference: Sequence[str], text: Sequence[str]) -> list[int]:
    """The table of longest common subsequences, a row for each word of the reference and one above them.

    Bit j of a row is 0 where the length over text[: j + 1] is one more than over text[:j]. All columns of a row are
    computed at once: the addition carries a step past the words that it cannot use. Source: Hyyro 2004, "Bit-parallel
    LCS-length computation revisited".
    """
    masks: dict[str, int] = {}  # word -> a bit for each column that holds it
    for index, word in enumerate(text):
        masks[word] = masks.get(word, 0) | 1 << index
    everything = (1 << len(text)) - 1
    row = everything
    rows = [row]
    for word in reference:
        matches = row & masks.get(word, 0)
        row = ((row + matches) | (row - matches)) & everything
        rows.append(row)
    return rows


def _common_indices(reference: Sequence[str], text: Sequence[str]) -> list[int]:
    """The indices in the reference of one longest common subsequence: of several, the one that rouge-score finds, which
    walks back from the end and prefers up to left."""
    known = set(text)
    kept = [index for index, word in enumerate(reference) if word in known]  # the walk passes the others straight up
    rows = _rows([reference[index] for index in kept], text)
    row, column = len(kept), len(text)
    indices = []

    def length(row: int, column: int) -> int:
        return column - (rows[row] & ((1 << column) - 1)).bit_count()

    while row > 0 and column > 0:
        if reference[kept[row - 1]] == text[column - 1]:
            indices.append(kept[row - 1])
            row -= 1
            column -= 1
        elif length(row, column - 1) > length(row - 1, column):
            column -= 1
        else:
            row -= 1
    return indices
