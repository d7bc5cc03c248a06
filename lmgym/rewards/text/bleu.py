"""BLEU and TER, with sacrebleu's numbers. chrF is in characters.py, ROUGE in rouge.py, METEOR in meteor.py."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lmgym.core.registry import register
from lmgym.rewards.text.references import corpus_of, needed, reference_check, references_of
from lmgym.stats.intervals import SufficientStatistics
from lmgym.types import Example

Tokenize = Literal["13a", "intl", "zh", "char", "none"]
Smoothing = Literal["exp", "floor", "add-k", "none"]
Gram = tuple[str, ...]
ORDER = 4
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
MARKS = {ord(mark): f" {mark} " for mark in '{|}~[\\]^_`!"#$%&()*+:;<=>?@/'}
SPACING = (
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


@register("reward", "sacre_bleu")
def sacre_bleu(
    texts: list[str],
    examples: list[Example],
    *,
    tokenize: Tokenize = "13a",
    smooth_method: Smoothing = "exp",
    lowercase: bool = False,
    effective_order: bool = True,
) -> list[float]:
    """BLEU as sacrebleu computes it, from 0 to 1: brevity penalty * geometric mean of the n-gram precisions, n = 1..4.

    All references count: an n-gram may be used as often as the reference that has most of it, and the length compared
    is that of the reference nearest in length. With `effective_order` a text of fewer than four tokens is judged on
    the orders that it has; the corpus value, `sacre_bleu.corpus`, is one BLEU of summed counts and always of order 4.
    The arguments are named as in sacrebleu. Sources: Papineni et al. 2002; Post 2018. Extra `metrics`.

    Raises LmgymError for an example without references.

    Example:
        >>> sacre_bleu(["The cat sat on the mat."], [Example("a/0", "?", references=("The cat sat on the mat.",))])
        [1.0]
    """
    bleu = _bleu("sacre_bleu", tokenize, lowercase)
    rows = _bleu_statistics("sacre_bleu", texts, examples, bleu)
    return [_bleu_value(bleu, row, smooth_method, effective_order) for row in rows]


def _sacre_bleu_sums(
    texts: list[str],
    examples: list[Example],
    *,
    tokenize: Tokenize = "13a",
    smooth_method: Smoothing = "exp",
    lowercase: bool = False,
    effective_order: bool = True,
) -> SufficientStatistics:
    """One BLEU of all texts, from 0 to 1; `effective_order` is for single texts, and ignored here."""
    bleu = _bleu("sacre_bleu", tokenize, lowercase)
    return _bleu_sums_of(bleu, _bleu_statistics("sacre_bleu", texts, examples, bleu), smooth_method)


@register("reward", "bleu")
def bleu(texts: list[str], examples: list[Example]) -> list[float]:
    """BLEU of the tokens between white space, without smoothing, from 0 to 1: 0 for a text that has no four tokens in
    a row in common with its references.

    The corpus value, `bleu.corpus`, is one BLEU of summed counts. Source: Papineni et al. 2002. RL4LMs' `bleu`, but
    for two or more references (the brevity penalty looks at the nearest in length, there at the shortest) and for an
    empty text (0, there the text "n/a"). Extra `metrics`.

    Example:
        >>> bleu(["the cat sat on the mat ."], [Example("a/0", "?", references=("the cat sat on the rug .",))])
        [0.6434588841607617]
    """
    metric = _bleu("bleu", "none", False)
    return [_bleu_value(metric, row, "none", False) for row in _bleu_statistics("bleu", texts, examples, metric)]


def _bleu_sums(texts: list[str], examples: list[Example]) -> SufficientStatistics:
    metric = _bleu("bleu", "none", False)
    return _bleu_sums_of(metric, _bleu_statistics("bleu", texts, examples, metric), "none")


def _bleu_sums_of(metric: Any, statistics: Iterator[tuple[int, ...]], smoothing: Smoothing) -> SufficientStatistics:
    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.array([_bleu_value(metric, row, smoothing, False) for row in sums.tolist()])

    return SufficientStatistics(np.array(list(statistics), np.int64).reshape(-1, 2 + 2 * ORDER), value)


@register("reward", "ter")
def ter(texts: list[str], examples: list[Example], *, case_sensitive: bool = False) -> list[float]:
    """1 - translation edit rate: 1 - edits / length of the reference, so that more is better; at most 1, below 0 where
    a text needs more edits than its reference has words.

    Edits are insertions, deletions, substitutions and moves of a run of words; those to the nearest reference count,
    over the mean length of the references. The corpus value, `ter.corpus`, is 1 - all edits / all lengths. Computed by
    sacrebleu, tens to hundreds of texts a second. Sources: Snover et al. 2006; RL4LMs' reward `ter` (its metric of
    that name is the rate itself, 1 less this). Extra `metrics`.

    Example: one word of three is wrong
        >>> ter(["a b x"], [Example("a/0", "?", references=("a b c",))])
        [0.6666666666666667]
    """
    return [1.0 - score.score / 100 for score in _ter_scores(texts, examples, case_sensitive)]


def _ter_sums(texts: list[str], examples: list[Example], *, case_sensitive: bool = False) -> SufficientStatistics:
    """Edits, and the words of the references."""

    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        edits, words = sums[:, 0], sums[:, 1]
        return 1.0 - np.where(words > 0, edits / np.where(words > 0, words, 1.0), edits > 0)  # as in sacrebleu

    scores = _ter_scores(texts, examples, case_sensitive)
    return SufficientStatistics(
        np.array([[score.num_edits, score.ref_length] for score in scores], float).reshape(-1, 2), value
    )


def _ter_scores(texts: Sequence[str], examples: Sequence[Example], case_sensitive: bool) -> list[Any]:
    metric = needed("sacrebleu.metrics", "ter").TER(case_sensitive=case_sensitive)
    references = references_of("ter", examples)
    return [metric.sentence_score(text, wanted) for text, wanted in zip(texts, references, strict=True)]


sacre_bleu.corpus = corpus_of(_sacre_bleu_sums)  # type: ignore[attr-defined]
sacre_bleu.check = reference_check("sacre_bleu", "sacrebleu")  # type: ignore[attr-defined]
bleu.corpus = corpus_of(_bleu_sums)  # type: ignore[attr-defined]
bleu.check = reference_check("bleu", "sacrebleu")  # type: ignore[attr-defined]
ter.corpus = corpus_of(_ter_sums)  # type: ignore[attr-defined]
ter.check = reference_check("ter", "sacrebleu")  # type: ignore[attr-defined]


def split_13a(text: str) -> list[str]:
    """The words and marks of a text by the rules of NIST's mteval-v13a, sacrebleu's default.

    Most marks stand alone; a point or comma does unless between digits, a hyphen behind a digit.

    Example:
        >>> split_13a("It's 3.5, well-known.")
        ["It's", '3.5', ',', 'well-known', '.']
    """
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    if "&" in text:
        for entity, mark in ENTITIES:
            text = text.replace(entity, mark)
    text = f" {text} ".translate(MARKS)
    for rule, spaced in SPACING:
        text = rule.sub(spaced, text)
    return text.split()


def _bleu(reward: str, tokenize: Tokenize, lowercase: bool) -> Any:
    return needed("sacrebleu.metrics", reward).BLEU(tokenize=tokenize, lowercase=lowercase)


def _bleu_value(bleu: Any, statistics: Sequence[int], smoothing: Smoothing, effective_order: bool) -> float:
    correct, total = list(statistics[2 : 2 + ORDER]), list(statistics[2 + ORDER :])
    score = bleu.compute_bleu(
        correct, total, statistics[0], statistics[1], smooth_method=smoothing, effective_order=effective_order
    )
    return min(1.0, float(score.score) / 100)  # sacrebleu's 100 is a little more than that


def _bleu_statistics(
    reward: str, texts: Sequence[str], examples: Sequence[Example], bleu: Any
) -> Iterator[tuple[int, ...]]:
    """Per text: its length, that of the nearest reference, n-grams in common by order, n-grams by order.

    sacrebleu's own way to these counts is half as fast, and reads the references of a group once for each answer.
    """

    own = bleu.tokenizer.signature() == "13a"

    def split(text: str) -> list[str]:
        text = text.lower() if bleu.lowercase else text
        return split_13a(text) if own else list(bleu.tokenizer(text.rstrip()).split())

    known: dict[tuple[str, ...], tuple[list[int], Counter[Gram]]] = {}
    for text, references in zip(texts, references_of(reward, examples), strict=True):
        if references not in known:
            known[references] = _reference_counts([split(reference) for reference in references])
        lengths, most = known[references]
        tokens = split(text)
        counts = _all_grams(tokens)
        correct = [0] * ORDER
        for gram in counts.keys() & most.keys():
            correct[len(gram) - 1] += min(counts[gram], most[gram])
        total = [max(0, len(tokens) - n + 1) for n in range(1, ORDER + 1)]
        nearest = min(lengths, key=lambda length: (abs(length - len(tokens)), length))
        yield len(tokens), nearest, *correct, *total


def _reference_counts(references: Sequence[list[str]]) -> tuple[list[int], Counter[Gram]]:
    """The length of each reference, and how often each n-gram occurs in the reference that has most of it."""
    most = _all_grams(references[0])
    for other in references[1:]:
        for gram, count in _all_grams(other).items():
            if count > most[gram]:
                most[gram] = count
    return [len(words) for words in references], most


def _all_grams(tokens: Sequence[str]) -> Counter[Gram]:
    shifted = [tokens[start:] for start in range(ORDER)]
    return Counter(chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, ORDER + 1)))
