"""CIDEr-D: n-grams shared with the references, weighted by how rare they are (TF-IDF).

The code is our own because pycocoevalcap scores only a whole corpus and takes the weights from that corpus' references;
a reward must not depend on the rest of its batch. For a corpus the numbers are the same, in 1.1 to 1.4 times less CPU
time (measured alternately with pycocoevalcap 1.2)."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from lmgym.core.constraints import PositiveFloat
from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.core.registry import register
from lmgym.rewards.text.references import Tokens, references_of, tokenise
from lmgym.types import Example

Gram = tuple[str, ...]
ORDER = 4


@dataclass(frozen=True)
class Vectors:
    """The TF-IDF vectors of a text, one for each order of n-grams.

    Example: Vectors(weights={("a",): 0.7}, norms=[0.7, 0.0, 0.0, 0.0], length=0)"""

    weights: dict[Gram, float]  # of the n-grams of all orders
    norms: list[float]  # L2 norm of each order's vector
    length: int  # of the text: its number of bigrams, as in the original


class IDF(dict[Gram, float]):
    """Inverse document frequency: n-gram -> log(number of documents / max(1, number of documents that have it)).
    Computed when an n-gram is looked up.

    Example: IDF(2, Counter({("a",): 1}))[("a",)] -> log 2"""

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
    sigma: PositiveFloat = 6.0,
    tokens: Tokens = "words",
) -> list[float]:
    """CIDEr-D, from 0 to 10: 10 exp(-d^2 / (2 sigma^2)) cos(text, reference), averaged over n = 1..4 and over all
    references; d is the difference of the lengths.

    The cosine is between vectors of n-gram counts, each weighted by log(N / number of documents that have the n-gram).
    A text gets no credit for repeating an n-gram more often than the reference. N and the documents come from the file
    `documents`: .txt with one document per line, or .jsonl with a text or a list of texts (the references of one
    document) per line. Without it all n-grams weigh the same, since a reward must not depend on the rest of its batch.
    The corpus value, `cider.corpus`, then uses the references of its examples as documents, one per example, as
    published results do; so a corpus of one example has the value 0. (RL4LMs' reward scores each text as a corpus of
    its own, so it is always 0.)

    Words are in lower case, without punctuation. For texts in that form the numbers equal pycocoevalcap's. Source:
    Vedantam et al. 2015.

    Raises LmgymError for an example without references, and for a file that cannot be read.

    Example: cider(["a dog runs home"], [Example("a/0", "?", references=("A dog runs home.",))]) -> [10.0]"""
    idf = None if documents is None else IDF(*_read(documents, tokens))
    return _scores(texts, examples, idf, sigma, tokens)


def _corpus(texts: list[str], examples: list[Example], *, documents: str | None = None, **options: Any) -> float:
    """The mean over the texts; without `documents`, the IDF comes from the references of these examples."""
    if documents is not None:
        values = cider(texts, examples, documents=documents, **options)
    else:
        sigma, tokens = options.get("sigma", 6.0), options.get("tokens", "words")
        distinct = {example.id: example.references for example in examples}
        idf = IDF(*_document_frequencies(distinct.values(), tokens))
        values = _scores(texts, examples, idf, sigma, tokens)
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
        raise LmgymError(f"sigma of CIDEr must be above 0, not {sigma}")
    vectors = cache(lambda text: _vectors(text, tokens, idf))  # the answers of a group have the same references
    values = []
    for text, references in zip(texts, references_of("cider", examples), strict=True):
        total = sum(_similarity(vectors(text), vectors(reference), sigma) for reference in references)
        values.append(min(10.0, 10.0 * total / len(references)))  # rounding may give a little more than 10
    return values


def _similarity(text: Vectors, reference: Vectors, sigma: float) -> float:
    """The mean cosine over the orders, times the penalty for a difference in length."""
    # Dot products by order. Iterate in the text's order: a sum of floats must not depend on the order of a hash.
    products = [0.0] * ORDER
    for gram, weight in text.weights.items():
        if gram in reference.weights:
            expected = reference.weights[gram]
            products[len(gram) - 1] += min(weight, expected) * expected  # clipped at the reference's weight
    # Divide by the norms; an order without n-grams adds 0.
    norms = [one * other for one, other in zip(text.norms, reference.norms, strict=True)]
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
    """How often each n-gram occurs in a text, n = 1..4."""
    words = tokenise(text, tokens, punctuation=False)
    shifted = [words[start:] for start in range(ORDER)]
    return Counter(chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, ORDER + 1)))


def _document_frequencies(documents: Iterable[Sequence[str]], tokens: Tokens) -> tuple[int, Counter[Gram]]:
    """The number of documents, and for each n-gram the number of documents that have it."""
    having: Counter[Gram] = Counter()
    number = 0
    for document in documents:
        number += 1
        having.update(set().union(*(_counts(text, tokens) for text in document)))
    return number, having


@lru_cache(maxsize=4)
def _read(path: str, tokens: Tokens) -> tuple[int, Counter[Gram]]:
    """The document frequencies of a file; see _document_frequencies."""
    key = "key 'documents' of CIDEr"  # of the rewards cider and spider, by whatever name
    file = Path(path)
    if file.suffix not in (".txt", ".jsonl"):
        raise LmgymError(f"{key}: {path} must end in .txt (a document a line) or .jsonl (a list of texts a line)")
    try:
        lines = [line.rstrip("\n") for line in StringIO(read_text(file))]  # splitlines would split in U+2028, too
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
    return _document_frequencies(documents, tokens)
