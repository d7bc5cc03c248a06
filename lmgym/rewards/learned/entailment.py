"""Whether a document supports a summary, sentence by sentence, in the eyes of a model of entailment (SummaC)."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.classifier import probabilities
from lmgym.rewards.learned.rows import Truncation, text_rows
from lmgym.rewards.learned.scorers import Compute, Device, Scorer, load_scorer
from lmgym.rewards.text.sentences import sentences
from lmgym.text.chat import messages_of, plain_text
from lmgym.types import Example

Pooling = Literal["max", "mean", "min"]
SHORTEST = 11  # characters of a sentence that counts, as in SummaC
ROWS = 10  # sentences of the summary that SummaC-Conv reads
# Bins of the head that SummaC's authors trained: percentiles of entailment over many summaries (their "percentile").
PERCENTILES = (
    *(0.0, 0.01, 0.02, 0.03, 0.04, 0.07, 0.13, 0.37, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.955, 0.96, 0.965, 0.97),
    *(0.975, 0.98, 0.985, 0.99, 0.995, 1.0),
)
POOLS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
}


class Image(NamedTuple):
    """Probabilities by sentence of the summary and sentence of the document, [summary][document].

    Example: Image(entailment=[[0.9, 0.1]], contradiction=[[0.0, 0.3]])
    """

    entailment: list[list[float]]
    contradiction: list[list[float]]


@register("reward", "summac_zero_shot")
def summac_zero_shot(
    texts: list[str],
    examples: list[Example],
    *,
    model: str,
    document: str | None = None,
    contradiction: bool = True,
    over_document: Pooling = "max",
    over_summary: Pooling = "mean",
    entailment_label: str | None = None,
    contradiction_label: str | None = None,
    max_sentences: int = 100,
    truncation: Truncation = "refuse",
    revision: str | None = None,
    device: Device = "auto",
    compute: Compute = "float32",
    tokens_per_forward: int = 16384,
) -> list[float]:
    """SummaC-ZS: each sentence of the summary is held against each of the document by a model of entailment; its score
    is the best entailment less (with `contradiction`) the strongest contradiction, the text's the mean over its
    sentences. From -1 to 1, or 0 to 1.

    The document is the prompt, or `meta[document]`. Sentences of ten characters or fewer do not count, nor do those
    behind the first `max_sentences` of either text; a text without a sentence that counts gets 0. The labels are those
    that begin with "entail" and "contra", unless named. Source: Laban et al. 2022 (arXiv 2111.09525), which splits
    sentences with NLTK's model; here they end at . ! ? before a capital or a digit, and at line ends.

    Raises LmgymError for a model without such labels, and as `learned_reward` does.

    Example:
        >>> summac_zero_shot(["The cat is on the mat."], [example], model="tals/albert-xlarge-vitaminc-mnli")
        [0.87]
    """
    scorer = load_scorer("summac_zero_shot", "classifier", model, revision, device, compute)
    labels = _labels("summac_zero_shot", scorer, entailment_label, contradiction_label, contradiction)
    documents = _documents("summac_zero_shot", examples, document)
    images = _images(
        "summac_zero_shot", scorer, texts, documents, labels, max_sentences, truncation, tokens_per_forward
    )
    values = []
    for image in images:
        scores = [POOLS[over_document](row) for row in image.entailment]
        if contradiction:
            against = [POOLS[over_document](row) for row in image.contradiction]
            scores = [one - other for one, other in zip(scores, against, strict=True)]
        values.append(float(POOLS[over_summary](scores)) if scores else 0.0)
    return values


@register("reward", "summac_conv")
def summac_conv(
    texts: list[str],
    examples: list[Example],
    *,
    model: str,
    head: str | None = None,
    document: str | None = None,
    over_summary: Pooling = "mean",
    entailment_label: str | None = None,
    max_sentences: int = 100,
    truncation: Truncation = "refuse",
    revision: str | None = None,
    device: Device = "auto",
    compute: Compute = "float32",
    tokens_per_forward: int = 16384,
) -> list[float]:
    """SummaC-Conv: for each of the summary's first ten sentences, a histogram of how strongly the document's sentences
    entail it, weighed by a trained head; the probability, 0 to 1, that the summary is consistent.

    `head` is a safetensors file with the head's weights, named as in SummaC's own (mlp.weight [1, bins], mlp.bias,
    layer_final.weight [2, 3], layer_final.bias): 23 bins are SummaC's percentiles, any other number equal parts of
    [0, 1]. Without it there is no score, since random weights mean nothing. The rest is as for `summac_zero_shot`.

    Raises LmgymError where there is no such head, and as `summac_zero_shot` does.

    Example:
        >>> summac_conv([text], [example], model="tals/albert-xlarge-vitaminc-mnli", head="summac.safetensors")
        [0.54]
    """
    weights = _head(head)
    scorer = load_scorer("summac_conv", "classifier", model, revision, device, compute)
    labels = _labels("summac_conv", scorer, entailment_label, None, False)
    documents = _documents("summac_conv", examples, document)
    images = _images("summac_conv", scorer, texts, documents, labels, max_sentences, truncation, tokens_per_forward)
    return [_consistent(image, weights, over_summary) if image.entailment else 0.0 for image in images]


def _check_zero_shot(examples: Sequence[Example], **arguments: Any) -> None:
    _documents("summac_zero_shot", examples, arguments.get("document"))
    summac_zero_shot([], [], **arguments)


def _check_conv(examples: Sequence[Example], **arguments: Any) -> None:
    _documents("summac_conv", examples, arguments.get("document"))
    summac_conv([], [], **arguments)


summac_zero_shot.check = _check_zero_shot  # type: ignore[attr-defined]  # see base.check_examples
summac_conv.check = _check_conv  # type: ignore[attr-defined]


def _images(
    reward: str,
    scorer: Scorer,
    texts: Sequence[str],
    documents: Sequence[str],
    labels: tuple[int, int | None],
    most: int,
    truncation: Truncation,
    budget: int,
) -> list[Image]:
    """An Image for each text; an empty one where either side has no sentence that counts."""
    if most < 1:
        raise LmgymError(f"key 'rewards.{reward}.max_sentences' must be at least 1, not {most}")
    split = cache(lambda text: [one for one in sentences(text) if len(one) >= SHORTEST][:most])
    sides = [(split(text), split(document)) for text, document in zip(texts, documents, strict=True)]
    pairs = [(premise, claim) for claims, premises in sides for claim in claims for premise in premises]
    rows = text_rows(reward, scorer, [one for one, _ in pairs], truncation, behind=[other for _, other in pairs])
    found = iter([probabilities(scorer, row) for row in batched_forward.logits(scorer, rows, budget)])
    supports, contradicts = labels
    images = []
    for claims, premises in sides:
        image = [[next(found) for _ in premises] for _ in claims] if premises else []
        entailment = [[pair[supports] for pair in row] for row in image]
        against = [] if contradicts is None else [[pair[contradicts] for pair in row] for row in image]
        images.append(Image(entailment, against))
    return images


def _labels(
    reward: str, scorer: Scorer, entailment: str | None, contradiction: str | None, both: bool
) -> tuple[int, int | None]:
    def index(key: str, named: str | None, beginning: str) -> int:
        names = scorer.labels
        fits = [i for i, name in enumerate(names) if (name == named if named else name.lower().startswith(beginning))]
        if len(fits) == 1:
            return fits[0]
        wanted = f"'{named}'" if named else f"that begins with '{beginning}'"
        raise LmgymError(
            f"key 'rewards.{reward}.{key}': {scorer.name} has no label {wanted}; write the one that means it. "
            f"{suggest(named or beginning, names)}"
        )

    first = index("entailment_label", entailment, "entail")
    return first, index("contradiction_label", contradiction, "contra") if both else None


def _documents(reward: str, examples: Sequence[Example], key: str | None) -> list[str]:
    if key is None:
        return [plain_text(messages_of(example.prompt)) for example in examples]
    for example in examples:
        if not isinstance(example.meta.get(key), str):
            raise LmgymError(
                f"key 'rewards.{reward}.document': example '{example.id}' has no text meta['{key}']; "
                f"{suggest(key, example.meta)}"
            )
    return [example.meta[key] for example in examples]


def _head(path: str | None) -> dict[str, Any]:
    """The weights of a trained head, in double precision. Raises LmgymError where there are none."""
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
    except Exception as error:  # safetensors raises a kind of its own
        raise LmgymError(
            f"{key}: {path} is no safetensors file ({error}); docs/learned_rewards.md says how to convert a .bin"
        ) from error
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    bins = weights["mlp.weight"].shape[-1] if "mlp.weight" in weights else 1
    wanted = {"mlp.weight": (1, bins), "mlp.bias": (1,), "layer_final.weight": (2, 3), "layer_final.bias": (2,)}
    if shapes != wanted:
        raise LmgymError(f"{key}: {path} holds {shapes}, and a head has {wanted}")
    edges = PERCENTILES if bins == len(PERCENTILES) - 1 else [i / bins for i in range(bins + 1)]
    return {**weights, "edges": torch.tensor(edges, dtype=torch.float64)}


def _consistent(image: Image, weights: dict[str, Any], over_summary: Pooling) -> float:
    import torch

    edges = weights["edges"]
    bins = len(edges) - 1
    supported = torch.tensor(image.entailment[:ROWS], dtype=torch.float64)
    places = (torch.bucketize(supported, edges, right=True) - 1).clamp(0, bins - 1)  # the last bin has both its ends
    histograms = torch.nn.functional.one_hot(places, bins).sum(1).double()
    said = (histograms @ weights["mlp.weight"][0] + weights["mlp.bias"]).tolist()
    feature = torch.full((3,), float(POOLS[over_summary](said)), dtype=torch.float64)
    return float((weights["layer_final.weight"] @ feature + weights["layer_final.bias"]).softmax(0)[1])
