"""METEOR: words that are equal, have one stem or are synonyms, and in how many pieces they stand together."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.references import Tokens, needed, reference_check, references_of, stem, tokenise
from lmgym.types import Example

Thesaurus = Callable[[str], frozenset[str]]
Placed = list[tuple[int, str]]  # words with their places in the text


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

    Words are matched in three stages, each with what the one before left: equal, same Porter stem, synonyms. P and R
    are the matches over the words of text and reference; chunks are runs of matches that are neighbours in both. Of
    several references the best counts; the corpus value is the mean. A text of n words equal to its reference gets
    1 - gamma / n^beta. Numbers of NLTK's `meteor_score`. Sources: Banerjee and Lavie 2005; Lavie and Agarwal 2007.

    Extra `metrics`. The synonyms are those of the WordNet that NLTK finds (`python -m nltk.downloader wordnet`);
    without one this raises LmgymError, since the same name must not stand for two measures: `meteor_stem` is the one
    without synonyms.

    Example:
        >>> meteor(["the cat sat"], [Example("a/0", "?", references=("the cat sat",))])     # 1 - 0.5 / 3**3
        [0.9814814814814815]
    """
    _wordnet()
    return _scores("meteor", texts, examples, synonyms, tokens, alpha, beta, gamma)


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

    Example:
        >>> meteor_stem(["cats sit"], [Example("a/0", "?", references=("a cat sits",))])     # P 1, R 2/3, 1 chunk
        [0.6465517241379309]
    """
    return _scores("meteor_stem", texts, examples, None, tokens, alpha, beta, gamma)


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    _wordnet()
    references_of("meteor", examples)


meteor.check = _check  # type: ignore[attr-defined]
meteor_stem.check = reference_check("meteor_stem", "nltk")  # type: ignore[attr-defined]


@lru_cache(maxsize=2**16)
def synonyms(word: str) -> frozenset[str]:
    """The words, not the phrases, that WordNet groups with this one in any sense.

    Example:
        >>> "auto" in synonyms("cars")
        True
    """
    senses = _wordnet().synsets(word)
    return frozenset(name for sense in senses for name in sense.lemma_names() if "_" not in name)


@cache
def _wordnet() -> Any:
    wordnet = needed("nltk.corpus", "meteor").wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        raise LmgymError(
            "reward 'meteor' needs WordNet for its synonyms: python -m nltk.downloader wordnet (or use 'meteor_stem', "
            "which has none)"
        ) from None
    return wordnet


def _scores(
    reward: str,
    texts: Sequence[str],
    examples: Sequence[Example],
    thesaurus: Thesaurus | None,
    tokens: Tokens,
    alpha: float,
    beta: float,
    gamma: float,
) -> list[float]:
    known: dict[str, list[str]] = {}
    values = []
    for text, references in zip(texts, references_of(reward, examples), strict=True):
        answer = tokenise(text, tokens)
        best = 0.0
        for reference in references:
            if reference not in known:
                known[reference] = tokenise(reference, tokens)
            wanted = known[reference]
            matches = align(answer, wanted, thesaurus)
            if not matches:
                continue
            precision, recall = len(matches) / len(answer), len(matches) / len(wanted)
            mean = precision * recall / (alpha * precision + (1 - alpha) * recall)
            penalty = gamma * (_chunks(matches) / len(matches)) ** beta
            best = max(best, (1 - penalty) * mean)
        values.append(best)
    return values


def align(text: Sequence[str], reference: Sequence[str], thesaurus: Thesaurus | None = None) -> list[tuple[int, int]]:
    """Pairs of places (in the text, in the reference) of words that match, in the order of the text.

    From the last word to the first, each takes the last free place that will do; this is NLTK's rule, not the least
    number of crossings. So is that the synonyms of what stemming left over are those of the stems.

    Example:
        >>> align(["a", "b", "a"], ["a", "c", "a"])
        [(0, 0), (2, 2)]
    """
    matches, words, wanted = _matched(list(enumerate(text)), list(enumerate(reference)))
    if words and wanted:
        stems = [(place, stem(word)) for place, word in words]
        more, left, free = _matched(stems, [(place, stem(word)) for place, word in wanted])
        matches += more
        if thesaurus is not None and left and free:
            matches += _matched_synonyms(left, free, thesaurus)
    return sorted(matches)


def _matched(words: Placed, wanted: Placed) -> tuple[list[tuple[int, int]], Placed, Placed]:
    """Pairs of places of equal words, the words without one, and the wanted words without one."""
    common = {word for _, word in words} & {word for _, word in wanted}
    if not common:
        return [], words, wanted
    free = _places([(place, word) for place, word in wanted if word in common])
    matches, left = [], []
    for place, word in reversed(words):
        if word in common and free[word]:
            matches.append((place, free[word].pop()))
        else:
            left.append((place, word))
    taken = {place for _, place in matches}
    return matches, left[::-1], [pair for pair in wanted if pair[0] not in taken]


def _matched_synonyms(words: Placed, wanted: Placed, thesaurus: Thesaurus) -> list[tuple[int, int]]:
    free = _places(wanted)
    matches = []
    for place, word in reversed(words):
        names = thesaurus(word)
        if word in free or not names.isdisjoint(free):
            candidates = [places for other, places in free.items() if places and (other == word or other in names)]
            if candidates:
                matches.append((place, max(candidates, key=lambda places: places[-1]).pop()))
    return matches


def _places(words: Placed) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, word in words:
        found.setdefault(word, []).append(place)
    return found


def _chunks(matches: Sequence[tuple[int, int]]) -> int:
    """Runs of matches that are neighbours in both texts."""
    return 1 + sum((after[0] - before[0], after[1] - before[1]) != (1, 1) for before, after in pairwise(matches))
