"""METEOR, computed by NLTK: words that are equal, share a stem or are synonyms, and how much they keep their order."""

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.references import Tokens, needed, reference_check, references_of, stem, tokenise
from lmgym.types import Example

NO_SYNONYMS = SimpleNamespace(synsets=lambda word: ())  # in place of WordNet


@register("reward", "meteor")
def meteor(
    texts: list[str],
    examples: list[Example],
    *,
    alpha: float = 0.9,
    beta: float = 3.0,
    gamma: float = 0.5,
    tokens: Tokens = "words",
) -> list[float]:
    """METEOR with synonyms, from 0 to 1: (1 - gamma (chunks / matches)^beta) * P R / (alpha P + (1 - alpha) R).

    Words are matched in three stages, each with the words that are still unmatched: equal words, equal Porter stems,
    synonyms. P is the number of matches / words of the text, R that / words of the reference. A chunk is a run of
    matches that are neighbours in both. The best reference counts; the corpus value is the mean. A text of n words that
    equals its reference gets 1 - gamma / n^beta. Computed by NLTK's `meteor_score`, with the words of `tokenise`.
    Sources: Banerjee and Lavie 2005; Lavie and Agarwal 2007.

    Extra `metrics`. The synonyms come from NLTK's WordNet (`python -m nltk.downloader wordnet`). Without it this raises
    LmgymError: one name must not mean two metrics. `meteor_stem` is the metric without synonyms.

    Example: meteor(["the cat sat"], [Example("a/0", "?", references=("the cat sat",))])  # 1 - 0.5 / 3**3
    -> [0.9814814814814815]"""
    return _scores("meteor", texts, examples, _wordnet(), tokens, alpha=alpha, beta=beta, gamma=gamma)


@register("reward", "meteor_stem")
def meteor_stem(
    texts: list[str],
    examples: list[Example],
    *,
    alpha: float = 0.9,
    beta: float = 3.0,
    gamma: float = 0.5,
    tokens: Tokens = "words",
) -> list[float]:
    """METEOR without synonyms: equal words and equal stems only. Needs no WordNet; see meteor.

    Example: meteor_stem(["cats sit"], [Example("a/0", "?", references=("a cat sits",))])  # P 1, R 2/3, 1 chunk
    -> [0.6465517241379309]"""
    return _scores("meteor_stem", texts, examples, NO_SYNONYMS, tokens, alpha=alpha, beta=beta, gamma=gamma)


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    _wordnet()
    references_of("meteor", examples)


meteor.check = _check  # type: ignore[attr-defined]
meteor_stem.check = reference_check("meteor_stem", "nltk")  # type: ignore[attr-defined]


@cache
def _wordnet() -> Any:
    """NLTK's WordNet, with a cache of looked-up words. Raises LmgymError if its files are missing."""
    wordnet = needed("nltk.corpus", "meteor").wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        raise LmgymError(
            "reward 'meteor' needs WordNet for its synonyms: python -m nltk.downloader wordnet (or use 'meteor_stem', "
            "which has none)"
        ) from None
    return SimpleNamespace(synsets=lru_cache(maxsize=2**16)(wordnet.synsets))


def _scores(
    reward: str, texts: Sequence[str], examples: Sequence[Example], wordnet: Any, tokens: Tokens, **weights: float
) -> list[float]:
    """NLTK's score of each text, with lmgym's words and cached stems; `wordnet` has a method `synsets(word)`."""
    meteor_score = needed("nltk.translate.meteor_score", reward).meteor_score
    split = cache(partial(tokenise, tokens=tokens))  # the answers of a group have the same references
    stemmer = SimpleNamespace(stem=stem)
    return [
        meteor_score([*map(split, references)], tokenise(text, tokens), stemmer=stemmer, wordnet=wordnet, **weights)
        for text, references in zip(texts, references_of(reward, examples), strict=True)
    ]
