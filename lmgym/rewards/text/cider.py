"""CIDEr-D: runs of words in common with the references, where what few references say counts for more.

The code is our own since pycocoevalcap computes a whole corpus only, and weighs n-grams by that corpus' references: a
reward must not depend on what else is in its batch. For a corpus the numbers are the same, in 1.1 to 1.4 times less CPU
time (measured in turn with pycocoevalcap 1.2).
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.references import Tokens, references_of, tokenise
from lmgym.types import Example

Gram = tuple[str, ...]
ORDER = 4


@dataclass(frozen=True)
class Vectors:
    """A text as CIDEr sees it: the weight of each n-gram, the length of the vector of each order, and the text's own.

    Example: Vectors(weights={("a",): 0.7}, norms=[0.7, 0.0, 0.0, 0.0], length=0)
    """

    weights: dict[Gram, float]
    norms: list[float]
    length: int  # number of bigrams, as in the original


class IDF(dict[Gram, float]):
    """Inverse document frequency: n-gram -> log(number of documents / how many have it, at least 1).

    Example: IDF(2, Counter({("a",): 1}))[("a",)] -> log 2
    """

    def __init__(self, documents: int, having: Counter[Gram]) -> None:
        super().__init__()
        self.logarithm = math.log(documents)
        self.having = having

    def __missing__(self, gram: Gram) -> float:
        value = self[gram] = self.logarithm - math.log(max(1, self.having[gram]))
        return value


@register("reward", "cider")
def cider(
    texts: list[str],
    examples: list[Example],
    *,
    documents: str | None = None,
    sigma: float = 6.0,
    tokens: Tokens = "words",
) -> list[float]:
    """CIDEr-D, from 0 to 10: the mean over n = 1..4 and over all references of 10 exp(-d^2 / (2 sigma^2)) cos(text,
    reference), where d is the difference of the lengths.

    The vectors of the cosine hold how often each n-gram occurs, weighted by log(N / number of documents that have it);
    a text gets no credit for more of an n-gram than the reference has. The documents, and N, are those of the file
    `documents`: .txt, a document a line, or .jsonl, a text or a list of texts (the references of one document) a line.
    Without one all n-grams weigh the same here, since a reward must not depend on what else is in its batch; the
    corpus value, `cider.corpus`, takes the references of its examples, one document each, as CIDEr is published. So a
    corpus of one example has 0. (RL4LMs' reward takes each text alone, so it is always 0.)

    Words are in lower case, without punctuation. Numbers of pycocoevalcap for texts in such words. Source: Vedantam et
    al. 2015.

    Raises LmgymError for an example without references, and for a file that cannot be read.

    Example:
        >>> cider(["a dog runs home"], [Example("a/0", "?", references=("A dog runs home.",))])
        [10.0]
    """
    idf = None if documents is None else IDF(*_read(documents, tokens))
    return _scores(texts, examples, idf, sigma, tokens)


def _corpus(
    texts: list[str],
    examples: list[Example],
    *,
    documents: str | None = None,
    sigma: float = 6.0,
    tokens: Tokens = "words",
) -> float:
    """The mean; without `documents`, weighted by how rare the n-grams are in the references of these examples."""
    if documents is not None:
        counted = _read(documents, tokens)
    else:
        references_of("cider", examples)
        distinct = {example.id: example.references for example in examples}
        counted = _document_counts(distinct.values(), tokens)
    values = _scores(texts, examples, IDF(*counted), sigma, tokens)
    return math.fsum(values) / len(values)


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    references_of("cider", examples)
    if arguments.get("documents") is not None:
        _read(arguments["documents"], arguments.get("tokens", "words"))


cider.corpus = _corpus  # type: ignore[attr-defined]
cider.check = _check  # type: ignore[attr-defined]


def _scores(
    texts: Sequence[str], examples: Sequence[Example], idf: IDF | None, sigma: float, tokens: Tokens
) -> list[float]:
    if sigma <= 0:
        raise LmgymError(f"key 'rewards.cider.sigma' must be above 0, not {sigma}")
    known: dict[str, Vectors] = {}
    values = []
    for text, references in zip(texts, references_of("cider", examples), strict=True):
        for reference in references:
            if reference not in known:
                known[reference] = _vectors(reference, tokens, idf)
        vectors = _vectors(text, tokens, idf)
        total = sum(_similarity(vectors, known[reference], sigma) for reference in references)
        values.append(min(10.0, 10.0 * total / len(references)))
    return values


def _similarity(text: Vectors, reference: Vectors, sigma: float) -> float:
    products = [0.0] * ORDER
    for gram, mine in text.weights.items():  # in the order of the text: sums of floats must not depend on hashes
        if gram in reference.weights:
            its = reference.weights[gram]
            products[len(gram) - 1] += min(mine, its) * its
    norms = [mine * its for mine, its in zip(text.norms, reference.norms, strict=True)]
    cosine = sum(product / norm for product, norm in zip(products, norms, strict=True) if norm) / ORDER
    difference = text.length - reference.length
    return cosine * math.exp(-(difference**2) / (2 * sigma**2))


def _vectors(text: str, tokens: Tokens, idf: IDF | None) -> Vectors:
    counts = _counts(text, tokens)
    weights = {gram: float(count) if idf is None else count * idf[gram] for gram, count in counts.items()}
    squares = [0.0] * ORDER
    for gram, weight in weights.items():
        squares[len(gram) - 1] += weight * weight
    return Vectors(weights, list(map(math.sqrt, squares)), sum(counts[gram] for gram in counts if len(gram) == 2))


def _counts(text: str, tokens: Tokens) -> Counter[Gram]:
    words = tokenise(text, tokens, punctuation=False)
    shifted = [words[start:] for start in range(ORDER)]
    return Counter(chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, ORDER + 1)))


def _document_counts(documents: Iterable[Sequence[str]], tokens: Tokens) -> tuple[int, Counter[Gram]]:
    having: Counter[Gram] = Counter()
    number = 0
    for document in documents:
        number += 1
        having.update(set().union(*(_counts(text, tokens) for text in document)))
    return number, having


@lru_cache(maxsize=4)
def _read(path: str, tokens: Tokens) -> tuple[int, Counter[Gram]]:
    """How many documents a file has, and in how many of them each n-gram occurs."""
    key = "key 'rewards.cider.documents'"
    file = Path(path)
    if file.suffix not in (".txt", ".jsonl"):
        raise LmgymError(f"{key}: {path} must end in .txt (a document a line) or .jsonl (a list of texts a line)")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LmgymError(f"{key}: cannot read {path}: {error}") from error
    documents: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line) if file.suffix == ".jsonl" else line
        except ValueError:
            value = None
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise LmgymError(f"{key}: line {number} of {path} must be a text or a list of texts, in JSON")
        documents.append(texts)
    if len(documents) < 2:
        raise LmgymError(f"{key}: {path} has {len(documents)} documents; rarity needs at least 2")
    return _document_counts(documents, tokens)
