"""BLEU, TER and chrF, computed by sacrebleu. ROUGE is in rouge.py, METEOR in meteor.py."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lmgym.core.registry import register
from lmgym.rewards.text.references import corpus_of, needed, reference_check, references_of, reward_of_sums
from lmgym.stats.intervals import SufficientStatistics
from lmgym.types import Example

Tokenize = Literal["13a", "intl", "zh", "char", "none"]
Smoothing = Literal["exp", "floor", "add-k", "none"]
ORDER = 4


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

    All references count: an n-gram is clipped at its highest count in any reference, and the brevity penalty uses the
    reference of the nearest length. With `effective_order` a text of fewer than four tokens is scored with the orders
    that it has. The corpus value, `sacre_bleu.corpus`, is one BLEU of summed counts, always of order 4. The arguments
    are named as in sacrebleu. Sources: Papineni et al. 2002; Post 2018. Extra `metrics`.

    Raises LmgymError for an example without references.

    Example: sacre_bleu(["The cat sat on the mat."], [Example("a/0", "?", references=("The cat sat on the mat.",))])
    -> [1.0]"""
    counts = _counts("sacre_bleu", texts, examples, tokenize, lowercase)
    return _values("sacre_bleu", counts, smooth_method, effective_order)


def _sacre_bleu_sums(
    texts: list[str],
    examples: list[Example],
    *,
    tokenize: Tokenize = "13a",
    smooth_method: Smoothing = "exp",
    lowercase: bool = False,
    **for_single_texts: bool,
) -> SufficientStatistics:
    """The counts for one BLEU of all texts, from 0 to 1."""
    return _sums("sacre_bleu", _counts("sacre_bleu", texts, examples, tokenize, lowercase), smooth_method)


@register("reward", "bleu")
@reward_of_sums
def bleu(texts: list[str], examples: list[Example]) -> SufficientStatistics:
    """BLEU of tokens split at white space, without smoothing, from 0 to 1: 0 for a text that shares no four tokens in a
    row with its references.

    The corpus value, `bleu.corpus`, is one BLEU of summed counts. Source: Papineni et al. 2002. Equals RL4LMs' `bleu`
    with two exceptions: with several references the brevity penalty uses the nearest in length (there the shortest),
    and an empty text gets 0 (there it becomes the text "n/a"). Extra `metrics`.

    Example: bleu(["the cat sat on the mat ."], [Example("a/0", "?", references=("the cat sat on the rug .",))])
    -> [0.6434588841607617]"""
    return _sums("bleu", _counts("bleu", texts, examples, "none"), "none")


@register("reward", "ter")
@reward_of_sums
def ter(texts: list[str], examples: list[Example], *, case_sensitive: bool = False) -> SufficientStatistics:
    """1 - translation edit rate: 1 - edits / length of the reference, so that higher is better. At most 1; below 0 if a
    text needs more edits than its reference has words.

    An edit inserts, deletes or replaces a word, or moves a run of words. The fewest edits to any reference are divided
    by the mean length of the references. The corpus value, `ter.corpus`, is 1 - all edits / all lengths. Computed by
    sacrebleu, at tens to hundreds of texts per second. Sources: Snover et al. 2006; RL4LMs' reward `ter` (its metric of
    this name is the rate itself, which is 1 - this value). Extra `metrics`.

    Example: one of three words is wrong: ter(["a b x"], [Example("a/0", "?", references=("a b c",))])
    -> [0.6666666666666667]"""

    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        edits, words = sums[:, 0], sums[:, 1]
        return 1.0 - np.where(words > 0, edits / np.where(words > 0, words, 1.0), edits > 0)  # as in sacrebleu

    metric = needed("sacrebleu.metrics", "ter").TER(case_sensitive=case_sensitive)
    pairs = zip(texts, references_of("ter", examples), strict=True)
    scores = [metric.sentence_score(text, references) for text, references in pairs]
    _forget_texts(metric.tokenizer)
    rows = [[score.num_edits, score.ref_length] for score in scores]  # edits, and the mean length of the references
    return SufficientStatistics(np.array(rows, float).reshape(-1, 2), value)


@register("reward", "chrf")
@reward_of_sums
def chrf(
    texts: list[str],
    examples: list[Example],
    *,
    char_order: int = 6,
    word_order: int = 0,
    beta: float = 2.0,
    lowercase: bool = False,
) -> SufficientStatistics:
    """Character n-gram F-score, from 0 to 1: (1 + beta^2) P R / (beta^2 P + R), where P and R are precision and recall
    averaged over n = 1..6 (those orders that both texts have).

    White space is ignored. The reference with the best score counts. The corpus value, `chrf.corpus`, is one F-score of
    summed counts. The arguments are named as in sacrebleu. Source: Popovic 2015. Extra `metrics`.

    Raises LmgymError for an example without references.

    Example: chrf(["abc"], [Example("a/0", "?", references=("abd",))])  # P = R = (2/3 + 1/2 + 0) / 3
    -> [0.38888888888888884]"""
    return _chrf_sums(
        "chrf", texts, examples, char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase
    )


@register("reward", "chrf_plus_plus")
@reward_of_sums
def chrf_plus_plus(
    texts: list[str], examples: list[Example], *, beta: float = 2.0, lowercase: bool = False
) -> SufficientStatistics:
    """chrF++: chrF that also counts words and word pairs. Source: Popovic 2017.

    Example: chrf_plus_plus(["abc"], [Example("a/0", "?", references=("abd",))])  # (2/3 + 1/2 + 0 + 0) / 4
    -> [0.29166666666666663]"""
    return _chrf_sums("chrf_plus_plus", texts, examples, char_order=6, word_order=2, beta=beta, lowercase=lowercase)


sacre_bleu.corpus = corpus_of(_sacre_bleu_sums)  # type: ignore[attr-defined]
sacre_bleu.check = reference_check("sacre_bleu", "sacrebleu")  # type: ignore[attr-defined]
bleu.check = reference_check("bleu", "sacrebleu")  # type: ignore[attr-defined]
ter.check = reference_check("ter", "sacrebleu")  # type: ignore[attr-defined]
chrf.check = reference_check("chrf", "sacrebleu")  # type: ignore[attr-defined]
chrf_plus_plus.check = reference_check("chrf_plus_plus", "sacrebleu")  # type: ignore[attr-defined]


def split_13a(text: str, reward: str = "sacre_bleu") -> list[str]:
    """The tokens of a text by the rules of NIST's mteval-v13a, sacrebleu's default.

    Most punctuation marks are separate tokens; a point or comma is, unless it is between digits, and a hyphen is after
    a digit. Raises LmgymError, in the name of `reward`, if sacrebleu is not installed.

    Example: split_13a("It's 3.5, well-known.") -> ["It's", '3.5', ',', 'well-known', '.']"""
    tokenizer = _tokenizer_13a(reward)
    tokens = list(tokenizer(text.rstrip()).split())
    _forget_texts(tokenizer)
    return tokens


@cache
def _tokenizer_13a(reward: str) -> Any:
    return needed("sacrebleu.tokenizers.tokenizer_13a", reward).Tokenizer13a()


def _values(reward: str, counts: Sequence[Sequence[int]], smoothing: Smoothing, effective_order: bool) -> list[float]:
    """BLEU, from 0 to 1, of each row of `_counts` (or of each sum of such rows)."""
    compute = partial(
        needed("sacrebleu.metrics", reward).BLEU.compute_bleu, smooth_method=smoothing, effective_order=effective_order
    )
    scores = [compute(list(row[2 : 2 + ORDER]), list(row[2 + ORDER :]), row[0], row[1]).score for row in counts]
    return [min(1.0, float(score) / 100) for score in scores]  # sacrebleu's 100 may be a little above 100 by rounding


def _sums(reward: str, counts: Sequence[Sequence[int]], smoothing: Smoothing) -> SufficientStatistics:
    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.array(_values(reward, sums.tolist(), smoothing, False))

    return SufficientStatistics(np.array(counts, np.int64).reshape(-1, 2 + 2 * ORDER), value)


def _counts(
    reward: str, texts: Sequence[str], examples: Sequence[Example], tokenize: Tokenize, lowercase: bool = False
) -> list[list[int]]:
    """A row of 10 counts per text: its tokens, the tokens of the reference of the nearest length, the n-grams that it
    shares with its references (n = 1..4), and all its n-grams (n = 1..4)."""
    metric = _counter(reward, tokenize, lowercase)
    pairs = zip(texts, references_of(reward, examples), strict=True)
    scores = [metric.sentence_score(text, references) for text, references in pairs]
    _forget_texts(metric.tokenizer)
    return [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]


@cache
def _counter(reward: str, tokenize: Tokenize, lowercase: bool) -> Any:
    """sacrebleu's BLEU without smoothing, which would change the counts."""
    options = {"tokenize": tokenize, "lowercase": lowercase, "smooth_method": "none"}
    return needed("sacrebleu.metrics", reward).BLEU(**options, effective_order=True)  # False warns for each text


def _forget_texts(tokenizer: Any) -> None:
    """Empty the caches of one of sacrebleu's tokenizers: each class keeps 65,536 texts for good."""
    for one in (tokenizer, getattr(tokenizer, "_post_tokenizer", None)):
        getattr(type(one).__call__, "cache_clear", lambda: None)()


def _chrf_sums(reward: str, texts: Sequence[str], examples: Sequence[Example], **options: Any) -> SufficientStatistics:
    """Counts [texts, 3 * orders]: of each order the n-grams of the text, of its best reference, and of both."""
    metric = needed("sacrebleu.metrics", reward).CHRF(**options)
    pairs = zip(texts, references_of(reward, examples), strict=True)
    # sacrebleu's public methods return the score alone, and an interval needs the counts.
    rows = [metric._extract_corpus_statistics([text], [[one] for one in references])[0] for text, references in pairs]

    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        scores = (metric._compute_score_from_stats(row).score for row in sums.tolist())
        return np.array([min(1.0, score / 100) for score in scores])  # rounding may give a little more than 100

    return SufficientStatistics(np.array(rows, np.int64).reshape(-1, 3 * metric.order), value)
