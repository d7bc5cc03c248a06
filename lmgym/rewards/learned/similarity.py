"""Similarity of a text to its references: `bert_score` compares token embeddings, `bleurt` is a trained regression."""

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.core.registry import register
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.classifier import check_scalar
from lmgym.rewards.learned.rows import Row, spaced, text_rows
from lmgym.rewards.learned.scorers import Scorer, by_model
from lmgym.rewards.text.references import references_of
from lmgym.types import Example

Part = Literal["f1", "precision", "recall"]


@register("reward", "bert_score")
@by_model("encoder", check=lambda examples, **_: references_of("bert_score", examples))
def bert_score(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    layer: int | None = None,
    part: Part = "f1",
    idf: str | None = None,
) -> list[float]:
    """BERTScore: each token is matched with the most similar token (cosine) of the other text. Precision is the mean
    similarity over the text's tokens, recall that over the reference's tokens, F1 = 2PR / (P + R); not rescaled.

    `model` is any encoder. `layer` is the hidden state to use (17 for roberta-large, for example; 0: the embeddings;
    default: the last). `idf` is a text file with one document per line: a token that n of the N documents have then
    weighs log((N + 1) / (n + 1)). Without it all tokens weigh 1. [CLS] and [SEP] weigh 0, but other tokens may match
    them. The best reference counts. A blank text or reference gets 0.

    Source: Zhang et al. 2020 (arXiv 1904.09675); the numbers are those of their package, which takes idf from the
    references of the call.

    Raises LmgymError for an example without references, and as `learned_reward` does.

    Example: bert_score(["a cat"], [Example("a/0", "?", references=("a cat",))], model="distilbert-base-uncased")
    -> [1.0]"""
    layers = scorer.model.config.get_text_config().num_hidden_layers
    if layer is not None and not 0 <= layer <= layers:
        raise LmgymError(f"key 'rewards.bert_score.layer': {scorer.name} has hidden states 0 to {layers}, not {layer}")
    references = references_of("bert_score", examples)
    weights = _weights(scorer, idf)
    # Embed each distinct text and reference once.
    distinct = list(dict.fromkeys([*texts, *(one for several in references for one in several)]))
    rows = text_rows(scorer, [spaced(scorer.tokenizer, one.strip()) for one in distinct])
    vectors = batched_forward.embeddings(scorer, rows, layer)
    embedded = {
        text: (vector / vector.norm(dim=-1, keepdim=True).clamp_min(1e-12), _weigh(row, weights))
        for text, row, vector in zip(distinct, rows, vectors, strict=True)
        if text.strip()
    }
    values = []
    for text, several in zip(texts, references, strict=True):
        pairs = [_matched(embedded[text], embedded[one]) for one in several if text in embedded and one in embedded]
        values.append(max((pair[part] for pair in pairs), default=0.0))
    return values


@register("reward", "bleurt")
@by_model("classifier", check=lambda examples, **_: references_of("bleurt", examples))
def bleurt(texts: list[str], examples: list[Example], scorer: Scorer) -> list[float]:
    """BLEURT: a regression model's output for the pair (reference, text), not rescaled; mostly between 0 and 1. The
    best reference counts.

    `model` is a checkpoint with one output, trained on such pairs: BLEURT's own, converted to transformers' format, or
    another. Source: Sellam et al. 2020 (arXiv 2004.04696).

    Raises LmgymError for an example without references, and as `reward_model` does.

    Example: bleurt(["a cat"], [Example("a/0", "?", references=("the cat",))], model="models/bleurt-20") -> [0.71]"""
    check_scalar(scorer)
    pairs = [
        (reference, text)
        for text, several in zip(texts, references_of("bleurt", examples), strict=True)
        for reference in several
    ]
    rows = text_rows(scorer, [one for one, _ in pairs], second=[other for _, other in pairs])
    outputs = iter(batched_forward.logits(scorer, rows))
    return [max(next(outputs)[0] for _ in example.references) for example in examples]


def _weights(scorer: Scorer, idf: str | None) -> tuple[dict[int, float], float]:
    """The weights of the known token ids, and the weight of all others."""
    if idf is None:
        tokenizer = scorer.tokenizer
        special = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        return {id: 0.0 for id in special if id is not None}, 1.0
    try:
        text = read_text(Path(idf))
    except (OSError, UnicodeDecodeError) as error:
        raise LmgymError(f"key 'rewards.bert_score.idf': cannot read {idf} as a text file ({error})") from error
    documents = [line.strip() for line in text.split("\n") if line.strip()]
    if not documents:
        raise LmgymError(f"key 'rewards.bert_score.idf': {idf} has no document; write one a line")
    return _inverse_frequencies(scorer.tokenizer, scorer.longest, tuple(documents))


@lru_cache(maxsize=8)
def _inverse_frequencies(
    tokenizer: Any, longest: int | None, documents: tuple[str, ...]
) -> tuple[dict[int, float], float]:
    reader = Scorer("", "bert_score", None, tokenizer, longest, truncation="right")
    rows = text_rows(reader, [spaced(tokenizer, one) for one in documents])
    counts = Counter(id for row in rows for id in set(row.ids))
    return {id: math.log((len(rows) + 1) / (n + 1)) for id, n in counts.items()}, math.log(len(rows) + 1)


def _weigh(row: Row, weights: tuple[dict[int, float], float]) -> Any:
    """The weights of a row's tokens [tokens], which add up to 1."""
    import torch

    known, other = weights
    values = torch.tensor([known.get(id, other) for id in row.ids], dtype=torch.float64)
    total = values.sum()
    return values / total if total > 0 else values


def _matched(text: tuple[Any, Any], reference: tuple[Any, Any]) -> dict[str, float]:
    """Precision, recall and F1 of two texts: unit vectors [tokens, width] and weights that add up to 1 [tokens]."""
    cosines = (text[0] @ reference[0].T).double()  # [tokens of the text, tokens of the reference]
    precision = float((cosines.max(1).values * text[1]).sum())
    recall = float((cosines.max(0).values * reference[1]).sum())
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
