"""ToTTo's metrics: PARENT and BLEU of all examples, and of the subsets whose table headers do or do not occur in the
training set."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.text.bleu import sacre_bleu
from lmgym.rewards.text.parent import parent
from lmgym.rewards.text.references import corpus_of, reference_check, registered
from lmgym.stats.intervals import SufficientStatistics
from lmgym.types import Example


@register("reward", "totto_bleu")
def totto_bleu(texts: list[str], examples: list[Example]) -> list[float]:
    """sacre_bleu in lower case, as ToTTo reports it; the corpus value is one BLEU of all texts. Extra `metrics`.

    Example: totto_bleu(["The Cat sat down"], [Example("a/0", "?", references=("the cat sat down",))]) -> [1.0]"""
    return sacre_bleu(texts, examples, lowercase=True)


def _bleu_sums(texts: list[str], examples: list[Example]) -> SufficientStatistics:
    found: SufficientStatistics = sacre_bleu.corpus.sums(texts, examples, lowercase=True)  # type: ignore[attr-defined]
    return found


_bleu_corpus = corpus_of(_bleu_sums)
totto_bleu.corpus = _bleu_corpus  # type: ignore[attr-defined]
totto_bleu.check = reference_check("totto_bleu", "sacrebleu")  # type: ignore[attr-defined]


def _parent_corpus(texts: list[str], examples: list[Example], **arguments: Any) -> float:
    values = parent(texts, examples, **arguments)
    return math.fsum(values) / len(values)


def _on_subset(
    name: str, whole: Callable[..., list[float]], overlap: bool, corpus: Callable[..., float]
) -> Callable[..., list[float]]:
    """Make and register the reward `name`: `whole` for the examples of one subset, 0 for the others. Only its corpus
    value, which leaves the others out, is a number about the subset."""

    @wraps(whole)  # takes the same arguments
    def function(texts: list[str], examples: list[Example], **arguments: Any) -> list[float]:
        values = whole(texts, examples, **arguments)
        return [value if within else 0.0 for value, within in zip(values, inside(examples), strict=True)]

    def of_subset(texts: list[str], examples: list[Example], **arguments: Any) -> float:
        chosen = [index for index, within in enumerate(inside(examples)) if within]
        if not chosen:
            return math.nan
        return corpus([texts[index] for index in chosen], [examples[index] for index in chosen], **arguments)

    def check(examples: Sequence[Example], **arguments: Any) -> None:
        whole.check(examples, **arguments)  # type: ignore[attr-defined]
        inside(examples)

    def inside(examples: Sequence[Example]) -> list[bool]:
        return [_overlaps(name, example) is overlap for example in examples]

    function.__module__ = __name__
    function.corpus, function.check = of_subset, check  # type: ignore[attr-defined]
    return registered(
        name,
        function,
        f"{whole.__name__} of the examples whose meta['overlap_subset'] is {str(overlap).lower()}, which ToTTo sets "
        f"for tables with headers that its training tables have, and 0 for the others. The corpus value is that of the "
        f"subset alone, NaN where it is empty.",
    )


parent_overlap = _on_subset("parent_overlap", parent, True, _parent_corpus)
parent_non_overlap = _on_subset("parent_non_overlap", parent, False, _parent_corpus)
totto_bleu_overlap = _on_subset("totto_bleu_overlap", totto_bleu, True, _bleu_corpus)
totto_bleu_non_overlap = _on_subset("totto_bleu_non_overlap", totto_bleu, False, _bleu_corpus)


def _overlaps(reward: str, example: Example) -> bool:
    raw = example.meta.get("raw_table")
    found = example.meta.get("overlap_subset", raw.get("overlap_subset") if isinstance(raw, Mapping) else None)
    if not isinstance(found, bool):
        raise LmgymError(
            f"reward '{reward}' needs meta['overlap_subset'], true or false, and that of example '{example.id}' is "
            f"{found!r}"
        )
    return found
