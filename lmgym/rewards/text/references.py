"""Shared by the metrics that compare with references: references, optional libraries, tokens, stems, n-grams, and
metrics that are computed from sums."""

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.stats.intervals import SufficientStatistics
from lmgym.types import Example

Tokens = Literal["words", "spaces"]
TOKEN = re.compile(r"\w+(?:[-./'\u2019]\w+|(?<=\d)[,:]\d+)*|\.{2,}|-{2,}|[^\w\s]")
ENDING = re.compile(r"(?:n['\u2019]t|['\u2019](?:s|m|d|ll|re|ve))$")
JOINED = {
    "cannot": ("can", "not"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "wanna": ("wan", "na"),
    "lemme": ("lem", "me"),
    "gimme": ("gim", "me"),
}
PUNCTUATION = frozenset(string.punctuation)
LONGEST_STEMMED = 100  # characters; no real word is longer, and stemming a very long one takes long


def references_of(reward: str, examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """The references of each example. Raises LmgymError with the id of the first example without any.

    Example: references_of("bleu", [Example("a/0", "?", references=("yes", "yes!"))]) -> [('yes', 'yes!')]"""
    for example in examples:
        if not example.references:
            raise LmgymError(f"reward '{reward}' needs a reference, and example '{example.id}' has none")
    return [example.references for example in examples]


def answers_of(reward: str, examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """As `references_of`, for a reward that pays a text for being equal to a reference. Raises LmgymError also for a
    blank reference, which would pay an empty answer."""
    for example in examples:
        if not all(reference.strip() for reference in example.references):
            raise LmgymError(
                f"reward '{reward}': a reference of example '{example.id}' is empty, so an empty answer would be "
                "right; give it a text, or leave the example out"
            )
    return references_of(reward, examples)


def reference_check(
    reward: str, *libraries: str, read: Callable[[str, Sequence[Example]], object] = references_of
) -> Callable[..., None]:
    """A function for a reward's attribute `check` (see base.check_examples): it raises LmgymError if one of the
    libraries is missing or `read` refuses the references of an example."""

    def check(examples: Sequence[Example], **arguments: Any) -> None:
        for library in libraries:
            needed(library, reward)
        read(reward, examples)

    return check


def corpus_of(sums: Callable[..., SufficientStatistics]) -> Callable[..., float]:
    """A function for a reward's attribute `corpus`, for a corpus metric that is computed from sums over the texts.
    `sums` takes the texts, their examples and the reward's arguments. It is also stored as the attribute `sums`, for
    intervals.

    Example:
        >>> bleu.corpus = corpus_of(_bleu_sums)
    """

    @wraps(sums)
    def corpus(texts: list[str], examples: list[Example], **arguments: Any) -> float:
        return sums(texts, examples, **arguments).figure

    corpus.sums = sums  # type: ignore[attr-defined]
    return corpus


def reward_of_sums(sums: Callable[..., SufficientStatistics]) -> Callable[..., list[float]]:
    """Decorator: turns `sums` into a reward. Its value for one text and its corpus value are both computed from `sums`;
    see corpus_of.

    Example:
        >>> @register("reward", "chrf")
        ... @reward_of_sums
        ... def chrf(texts, examples, *, beta=2.0): return SufficientStatistics(counts_of(texts, examples), f_score)
    """

    @wraps(sums)  # takes the same arguments
    def reward(texts: list[str], examples: list[Example], **arguments: Any) -> list[float]:
        statistics = sums(texts, examples, **arguments)
        values: list[float] = statistics.value(statistics.rows).tolist()
        return values

    reward.corpus = corpus_of(sums)  # type: ignore[attr-defined]
    return reward


def registered(name: str, function: Callable[..., list[float]], what: str) -> Callable[..., list[float]]:
    """Register a function that was made for this name (a family of metrics shares its code); `what` documents it."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = what
    return register("reward", name)(function)


def needed(module: str, reward: str) -> Any:
    """Import a module of an optional library. Raises LmgymError with the extra to install.

    Example:
        >>> BLEU = needed("sacrebleu.metrics", "bleu").BLEU
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise LmgymError(
            f"reward '{reward}' needs the library {library}: pip install 'lmgym[metrics]' ({error})"
        ) from error


def tokenise(text: str, tokens: Tokens = "words", punctuation: bool = True) -> list[str]:
    """The words and punctuation marks of a text, in lower case.

    "words": a word is a run of letters and digits, which may contain single hyphens, points, slashes and apostrophes,
    and commas or colons between digits. Endings such as n't and 's are separate words, as in the Penn Treebank. Every
    other character is a mark; "..." and "--" are one mark each. "spaces" splits at white space, for texts that are
    tokenised already. Without `punctuation`, tokens of ASCII punctuation only are left out.

    NLTK's `word_tokenize` (used by RL4LMs) needs a model that must be downloaded. It differs in few sentences: it keeps
    the point of an abbreviation with its word and writes quotation marks as `` and ''.

    Example: tokenise("Don't stop. He's 7.5!") -> ['do', "n't", 'stop', '.', 'he', "'s", '7.5', '!']"""
    text = text.lower()
    if tokens == "spaces":
        split = text.split()
    else:
        split = TOKEN.findall(text)
        # Most texts have no contraction, and this pass over all tokens is slow.
        if "'" in text or "\u2019" in text or not JOINED.keys().isdisjoint(split):
            split = [part for token in split for part in _split_contraction(token)]
    return split if punctuation else [token for token in split if not PUNCTUATION.issuperset(token)]


def _split_contraction(token: str) -> tuple[str, ...]:
    """("do", "n't") of "don't", ("gon", "na") of "gonna"; other tokens stay whole."""
    ending = ENDING.search(token)
    if ending is not None and ending.start() > 0:
        return token[: ending.start()], ending[0]
    return JOINED.get(token, (token,))


@lru_cache(maxsize=2**16)
def stem(word: str) -> str:
    """NLTK's Porter stem of a lower-case word; a word of more than 100 characters is returned unchanged.

    Example: stem("fields"), stem("looking") -> ('field', 'look')"""
    return str(_stemmer().stem(word)) if len(word) <= LONGEST_STEMMED else word


def grams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """How often each run of n tokens occurs.

    Example: grams(["a", "b", "a", "b"], 2) -> Counter({('a', 'b'): 2, ('b', 'a'): 1})"""
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False))


def in_common(one: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> int:
    """Size of the intersection of two multisets.

    Example: in_common(Counter("aab"), Counter("abb")) -> 2"""
    return sum(min(one[gram], other[gram]) for gram in one.keys() & other.keys())


@cache
def _stemmer() -> Any:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise LmgymError(f"words are stemmed by the library nltk: pip install 'lmgym[metrics]' ({error})") from error
    return PorterStemmer()
