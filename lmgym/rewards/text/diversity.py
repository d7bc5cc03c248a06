"""Diversity of texts: type-token ratios, numbers of distinct n-grams and of n-grams that occur once, entropies.

Each metric is a reward for a single text. Its attribute `corpus` measures many texts together, as diversity is usually
reported: texts that are varied inside may still all be the same."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.references import Tokens, grams, registered, tokenise
from lmgym.types import Example

Texts = Sequence[Sequence[str]]  # each a list of words
Counts = Counter[tuple[str, ...]]


def distinct(texts: Texts, n: int) -> float:
    """Number of distinct n-grams / number of n-grams; 0 without any n-gram. Source: Li et al. 2016.

    Example: distinct([["the", "cat", "sat"], ["the", "cat", "ran"]], 2) -> 0.75"""
    counts = _counted(texts, n)
    return len(counts) / counts.total() if counts else 0.0


def vocabulary(texts: Texts, n: int) -> float:
    """Number of distinct n-grams.

    Example: vocabulary([["the", "cat", "sat"], ["the", "cat", "ran"]], 1) -> 4.0"""
    return float(len(_counted(texts, n)))


def unique(texts: Texts, n: int) -> float:
    """Number of n-grams that occur exactly once.

    Example: unique([["the", "cat", "sat"], ["the", "cat", "ran"]], 1) -> 2.0"""
    return float(sum(count == 1 for count in _counted(texts, n).values()))


def entropy(texts: Texts, n: int) -> float:
    """Shannon entropy of the n-grams, in bits; 0 without any n-gram.

    Example: entropy([["the", "cat", "sat"], ["the", "cat", "ran"]], 2) -> 1.5"""
    counts = _counted(texts, n)
    total = counts.total()
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values()) + 0.0


def conditional_entropy(texts: Texts, n: int) -> float:
    """Conditional entropy of the next word, in bits: - sum p(n-gram) log2(p(n-gram) / p(its first n - 1 words)).

    As in GEM, each p is a fraction of all n-grams of the same length. The last n - 1 words of a text count as a shorter
    n-gram although no n-gram begins with them. So the value of short texts may be below 0.

    Example: round(conditional_entropy([["the", "cat", "sat"], ["the", "cat", "ran"]], 2), 5) -> -0.08496"""
    counts, shorter = _counted(texts, n), _counted(texts, n - 1)
    total, base = counts.total(), shorter.total()
    return -math.fsum(
        count / total * math.log2(count / total / (shorter[gram[:-1]] / base)) for gram, count in counts.items()
    )


def mean_segmental(texts: Texts, window: int) -> float:
    """Mean type-token ratio of segments. All texts are joined and cut into segments of `window` words; the words after
    the last full segment are ignored. NaN if there is no full segment. Source: Johnson 1944 (MSTTR).

    Example: mean_segmental([["a", "b", "a", "c", "d"], ["d", "d", "e", "f"]], 4) -> 0.625  # (3/4 + 2/4) / 2"""
    words = [word for text in texts for word in text]
    ratios = [len(set(words[start : start + window])) / window for start in range(0, len(words) - window + 1, window)]
    return sum(ratios) / len(ratios) if ratios else math.nan


def _counted(texts: Texts, n: int) -> Counts:
    counts: Counts = Counter()
    for text in texts:
        counts.update(grams(text, n))
    return counts


def _metric(name: str, measure: Callable[[Texts, int], float], n: int, what: str) -> Callable[..., list[float]]:
    """Make and register the reward `name`: `measure` of each text alone; its corpus value is `measure` of all texts."""

    def function(
        texts: list[str], examples: list[Example], *, punctuation: bool = True, tokens: Tokens = "words"
    ) -> list[float]:
        return [measure([tokenise(text, tokens, punctuation)], n) for text in texts]

    def corpus(
        texts: list[str], examples: list[Example], *, punctuation: bool = True, tokens: Tokens = "words"
    ) -> float:
        return measure([tokenise(text, tokens, punctuation) for text in texts], n)

    function.corpus = corpus  # type: ignore[attr-defined]
    return registered(
        name,
        function,
        f"{what} Words are in lower case; `punctuation` false leaves out marks. The corpus value is that of all texts "
        "together. Source: GEM's diversity metrics (Gehrmann et al. 2021, arXiv 2102.01672).",
    )


distinct_1 = _metric("distinct_1", distinct, 1, "Different words over words.")
distinct_2 = _metric("distinct_2", distinct, 2, "Different pairs of neighbouring words over all pairs.")
distinct_3 = _metric("distinct_3", distinct, 3, "Different runs of three words over all such runs.")
vocabulary_1 = _metric("vocabulary_1", vocabulary, 1, "Number of different words.")
vocabulary_2 = _metric("vocabulary_2", vocabulary, 2, "Number of different pairs of neighbouring words.")
vocabulary_3 = _metric("vocabulary_3", vocabulary, 3, "Number of different runs of three words.")
unique_1 = _metric("unique_1", unique, 1, "Number of words that occur once.")
unique_2 = _metric("unique_2", unique, 2, "Number of pairs of neighbouring words that occur once.")
unique_3 = _metric("unique_3", unique, 3, "Number of runs of three words that occur once.")
entropy_1 = _metric("entropy_1", entropy, 1, "Entropy of the words, in bits.")
entropy_2 = _metric("entropy_2", entropy, 2, "Entropy of the pairs of neighbouring words, in bits.")
entropy_3 = _metric("entropy_3", entropy, 3, "Entropy of the runs of three words, in bits.")
conditional_entropy_2 = _metric(
    "conditional_entropy_2", conditional_entropy, 2, "Entropy of a word given the one before it, in bits."
)
conditional_entropy_3 = _metric(
    "conditional_entropy_3", conditional_entropy, 3, "Entropy of a word given the two before it, in bits."
)


@register("reward", "msttr")
def msttr(
    texts: list[str], examples: list[Example], *, window: int = 100, punctuation: bool = True, tokens: Tokens = "words"
) -> list[float]:
    """Mean segmental type-token ratio: the mean over the text's segments of `window` words, without the shorter rest.

    A text of fewer words is one segment, since a reward must be a number; an empty text gets 0. The corpus value,
    `msttr.corpus`, joins all texts before it cuts them, and is NaN if there is no full segment. Sources: Johnson 1944;
    RL4LMs' diversity metrics (GEM).

    Example: msttr(["a b a c d d d e f", "a a b"], examples, window=4)  # (3/4 + 2/4) / 2, 2/3
    -> [0.625, 0.6666666666666666]"""
    _check_window(window)
    split = [tokenise(text, tokens, punctuation) for text in texts]
    return [mean_segmental([words], min(window, len(words))) if words else 0.0 for words in split]


def _msttr_corpus(
    texts: list[str], examples: list[Example], *, window: int = 100, punctuation: bool = True, tokens: Tokens = "words"
) -> float:
    _check_window(window)
    return mean_segmental([tokenise(text, tokens, punctuation) for text in texts], window)


msttr.corpus = _msttr_corpus  # type: ignore[attr-defined]


@register("reward", "prediction_length")
def prediction_length(
    texts: list[str], examples: list[Example], *, punctuation: bool = True, tokens: Tokens = "words"
) -> list[float]:
    """Number of words and marks; the corpus value is the mean. Source: RL4LMs' diversity metrics (mean_pred_length).

    Example: prediction_length(["Don't stop."], [example]) -> [4.0]  # do, n't, stop, ."""
    return [float(len(tokenise(text, tokens, punctuation))) for text in texts]


def _check_window(window: int) -> None:
    if window < 1:
        raise LmgymError(f"key 'rewards.msttr.window' must be at least 1, not {window}")
