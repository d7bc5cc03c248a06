"""chrF and chrF++: character n-grams shared with the references, computed by sacrebleu."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmgym.core.registry import register
from lmgym.rewards.text.references import needed, reference_check, references_of, reward_of_sums
from lmgym.stats.intervals import SufficientStatistics
from lmgym.types import Example


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
    return _sums("chrf", texts, examples, char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)


@register("reward", "chrf_plus_plus")
@reward_of_sums
def chrf_plus_plus(
    texts: list[str], examples: list[Example], *, beta: float = 2.0, lowercase: bool = False
) -> SufficientStatistics:
    """chrF++: chrF that also counts words and word pairs. Source: Popovic 2017.

    Example: chrf_plus_plus(["abc"], [Example("a/0", "?", references=("abd",))])  # (2/3 + 1/2 + 0 + 0) / 4
    -> [0.29166666666666663]"""
    return _sums("chrf_plus_plus", texts, examples, char_order=6, word_order=2, beta=beta, lowercase=lowercase)


chrf.check = reference_check("chrf", "sacrebleu")  # type: ignore[attr-defined]
chrf_plus_plus.check = reference_check("chrf_plus_plus", "sacrebleu")  # type: ignore[attr-defined]


def _sums(reward: str, texts: Sequence[str], examples: Sequence[Example], **options: Any) -> SufficientStatistics:
    """Counts [texts, 3 * orders]: of each order the n-grams of the text, of its best reference, and of both."""
    metric = needed("sacrebleu.metrics", reward).CHRF(**options)
    pairs = zip(texts, references_of(reward, examples), strict=True)
    # sacrebleu's public methods return the score alone, and an interval needs the counts.
    rows = [metric._extract_corpus_statistics([text], [[one] for one in references])[0] for text, references in pairs]

    def value(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        scores = (metric._compute_score_from_stats(row).score for row in sums.tolist())
        return np.array([min(1.0, score / 100) for score in scores])  # rounding may give a little more than 100

    return SufficientStatistics(np.array(rows, np.int64).reshape(-1, 3 * metric.order), value)
