"""SummaC: does a document support a summary, sentence by sentence? An entailment (NLI) model decides."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.classifier import probabilities
from lmgym.rewards.learned.rows import text_rows
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.rewards.text.sentences import sentences
from lmgym.text.chat import plain_text
from lmgym.types import Example

Pooling = Literal["max", "mean", "min"]
SHORTEST = 11  # characters; shorter sentences do not count, as in SummaC
ROWS = 10  # SummaC-Conv reads the first so many sentences of the summary
# Bin edges of the head that SummaC's authors trained: percentiles of entailment over many summaries.
PERCENTILES = (
    *(0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.955, 0.96, 0.965, 0.97),
    *(0.975, 0.98, 0.985, 0.99, 0.995, 1.0),
)
POOLS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
}


class PairProbabilities(NamedTuple):
    """Probabilities for each pair of sentences, indexed [sentence of the summary][sentence of the document]."""

    entailment: list[list[float]]
    contradiction: list[list[float]]


@register("reward", "summac_zero_shot")
@by_model("classifier", lambda examples, document=None, **_: _documents("summac_zero_shot", examples, document))
def summac_zero_shot(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    document: str | None = None,
    contradiction: bool = True,
    over_document: Pooling = "max",
    over_summary: Pooling = "mean",
    entailment_label: str | None = None,
    contradiction_label: str | None = None,
    max_sentences: int = 100,
) -> list[float]:
    """SummaC-ZS: an entailment model compares each sentence of the summary with each sentence of the document. A
    sentence's score is its highest entailment minus (with `contradiction`) its highest contradiction; the text's score
    is the mean over its sentences. From -1 to 1; without `contradiction` from 0 to 1.

    The document is the prompt, or `meta[document]`. Sentences of ten characters or fewer do not count, and of either
    text only the first `max_sentences` do. A text without such a sentence gets 0. The labels are the ones that begin
    with "entail" and "contra", unless you name them. Source: Laban et al. 2022 (arXiv 2111.09525). They split sentences
    with NLTK's model; here a sentence ends at . ! ? before a capital letter or a digit, and at a line end.

    Raises LmgymError for a model without such labels, and as `learned_reward` does.

    Example: summac_zero_shot(["The cat is on the mat."], [example], model="tals/albert-xlarge-vitaminc-mnli") -> [0.87]
    """
    labels = _labels(scorer, entailment_label, contradiction_label, contradiction)
    documents = _documents(scorer.reward, examples, document)
    pairs = _pairs(scorer, texts, documents, labels, max_sentences)
    values = []
    for of_text in pairs:
        scores = [POOLS[over_document](row) for row in of_text.entailment]
        if contradiction:
            against = [POOLS[over_document](row) for row in of_text.contradiction]
            scores = [support - doubt for support, doubt in zip(scores, against, strict=True)]
        values.append(float(POOLS[over_summary](scores)) if scores else 0.0)
    return values


@register("reward", "summac_conv")
@by_model("classifier", lambda examples, document=None, **_: _documents("summac_conv", examples, document))
def summac_conv(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    head: str | None = None,
    document: str | None = None,
    over_summary: Pooling = "mean",
    entailment_label: str | None = None,
    max_sentences: int = 100,
) -> list[float]:
    """SummaC-Conv: the probability, 0 to 1, that the summary is consistent with the document. For each of the first ten
    sentences of the summary, a histogram counts how strongly the document's sentences entail it; a trained head turns
    the histograms into the probability.

    `head` is a safetensors file with the head's weights, named as in SummaC (mlp.weight [1, bins], mlp.bias,
    layer_final.weight [2, 3], layer_final.bias). With 23 bins the edges are SummaC's percentiles; any other number of
    bins divides [0, 1] equally. The head is required, since random weights mean nothing. Other arguments are as for
    `summac_zero_shot`.

    Raises LmgymError if the head is missing or wrong, and as `summac_zero_shot` does.

    Example: summac_conv([text], [example], model="tals/albert-xlarge-vitaminc-mnli", head="summac.safetensors")
    -> [0.54]"""
    weights = _head(head)
    labels = _labels(scorer, entailment_label, None, False)
    pairs = _pairs(scorer, texts, _documents(scorer.reward, examples, document), labels, max_sentences)
    return [_consistent(own, weights, over_summary) if own.entailment else 0.0 for own in pairs]


def _pairs(
    scorer: Scorer, texts: Sequence[str], documents: Sequence[str], labels: tuple[int, int | None], most: int
) -> list[PairProbabilities]:
    """One PairProbabilities per text; an empty one if the text or its document has no sentence that counts."""
    if most < 1:
        raise LmgymError(f"key 'rewards.{scorer.reward}.max_sentences' must be at least 1, not {most}")
    # Run all pairs (document's sentence, summary's sentence) of all texts through the model at once.
    split = cache(lambda text: [one for one in sentences(text) if len(one) >= SHORTEST][:most])
    sides = [(split(text), split(document)) for text, document in zip(texts, documents, strict=True)]
    pairs = [(premise, claim) for claims, premises in sides for claim in claims for premise in premises]
    rows = text_rows(scorer, [one for one, _ in pairs], second=[other for _, other in pairs])
    outputs = iter([probabilities(scorer, row) for row in batched_forward.logits(scorer, rows)])
    # Hand the outputs back to their texts, in the same order.
    entailed, contradicted = labels
    results = []
    for claims, premises in sides:
        table = [[next(outputs) for _ in premises] for _ in claims] if premises else []
        entailment = [[output[entailed] for output in row] for row in table]
        against = [] if contradicted is None else [[output[contradicted] for output in row] for row in table]
        results.append(PairProbabilities(entailment, against))
    return results


def _labels(scorer: Scorer, entailment: str | None, contradiction: str | None, both: bool) -> tuple[int, int | None]:
    """The indices of the labels for entailment and (if `both`) contradiction among the classifier's outputs."""

    def index(key: str, named: str | None, beginning: str) -> int:
        names = scorer.labels
        fits = [i for i, name in enumerate(names) if (name == named if named else name.lower().startswith(beginning))]
        if len(fits) == 1:
            return fits[0]
        missing = f"'{named}'" if named else f"that begins with '{beginning}'"
        raise LmgymError(
            f"key 'rewards.{scorer.reward}.{key}': {scorer.name} has no label {missing}; write the one that means it. "
            f"{suggest(named or beginning, names)}"
        )

    first = index("entailment_label", entailment, "entail")
    return first, index("contradiction_label", contradiction, "contra") if both else None


def _documents(reward: str, examples: Sequence[Example], key: str | None) -> list[str]:
    if key is None:
        return [plain_text(example.prompt) for example in examples]
    for example in examples:
        if not isinstance(example.meta.get(key), str):
            raise LmgymError(
                f"key 'rewards.{reward}.document': example '{example.id}' has no text meta['{key}']; "
                f"{suggest(key, example.meta)}"
            )
    return [example.meta[key] for example in examples]


def _head(path: str | None) -> dict[str, Any]:
    """The weights of a trained head in double precision, and its bin edges. Raises LmgymError if the file is wrong."""
    import torch
    from safetensors.torch import load_file

    key = "key 'rewards.summac_conv.head'"
    if path is None or not Path(path).is_file():
        missing = "it has none" if path is None else f"there is no file {path}"
        raise LmgymError(
            f"{key}: 'summac_conv' needs the weights of a trained head, and {missing}; name a safetensors file with "
            "them, or take 'summac_zero_shot', which needs no training"
        )
    try:
        weights = {name: value.double() for name, value in load_file(path).items()}
    except Exception as error:  # safetensors' own error class extends Exception directly
        raise LmgymError(
            f"{key}: {path} is no safetensors file ({error}); docs/learned_rewards.md says how to convert a .bin"
        ) from error
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    bins = weights["mlp.weight"].shape[-1] if "mlp.weight" in weights else 1
    expected = {"mlp.weight": (1, bins), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,)}
    if shapes != expected:
        raise LmgymError(f"{key}: {path} holds {shapes}, and a head has {expected}")
    edges = PERCENTILES if bins == len(PERCENTILES) - 1 else [i / bins for i in range(bins + 1)]
    return {**weights, "edges": torch.tensor(edges, dtype=torch.float64)}


def _consistent(pairs: PairProbabilities, weights: dict[str, Any], over_summary: Pooling) -> float:
    """SummaC-Conv's probability that the summary is consistent."""
    import torch

    # For each sentence of the summary [S], a histogram [S, bins] over the document's sentences.
    edges = weights["edges"]
    bins = len(edges) - 1
    entailment = torch.tensor(pairs.entailment[:ROWS], dtype=torch.float64)
    indices = (torch.bucketize(entailment, edges, right=True) - 1).clamp(0, bins - 1)  # 1.0 belongs to the last bin
    histograms = torch.nn.functional.one_hot(indices, bins).sum(1).double()
    # The head scores each sentence. Its last layer has three inputs, which all get the pooled score, as in SummaC.
    scores = (histograms @ weights["mlp.weight"][0] + weights["mlp.bias"]).tolist()
    feature = torch.full((3,), float(POOLS[over_summary](scores)), dtype=torch.float64)
    return float((weights["layer_final.weight"] @ feature + weights["layer_final.bias"]).softmax(0)[1])
