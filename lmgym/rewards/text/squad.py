"""SQuAD's metrics: exact match and F1 of words. Articles, case and punctuation are ignored."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from lmgym.core.registry import register
from lmgym.rewards.text.references import reference_check, references_of
from lmgym.types import Example

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@register("reward", "squad_exact_match")
def squad_exact_match(texts: list[str], examples: list[Example]) -> list[float]:
    """1 if the text equals one of the references, else 0. Case, ASCII punctuation, English articles and extra spaces
    are ignored; an empty reference means that there is no answer, and an empty text is right. Source: Rajpurkar et al.
    2016 (SQuAD).

    Raises LmgymError for an example without references.

    Example: squad_exact_match(["The Eiffel Tower!"], [Example("a/0", "?", references=("Eiffel tower",))]) -> [1.0]"""
    return _best("squad_exact_match", texts, examples, lambda answer, reference: float(answer == reference))


@register("reward", "token_f1")
def token_f1(texts: list[str], examples: list[Example]) -> list[float]:
    """F1 of the words shared with a reference, from 0 to 1; the best reference counts. Words are as in
    squad_exact_match. If text or reference has no words: 1 if both have none, else 0. Source: Rajpurkar et al. 2016.

    Example: token_f1(["in the year 1889"], [Example("a/0", "?", references=("1889", "in 1887"))])  # P 1/3, R 1
    -> [0.5]"""
    return _best("token_f1", texts, examples, _f1)


squad_exact_match.check = reference_check("squad_exact_match")  # type: ignore[attr-defined]
token_f1.check = reference_check("token_f1")  # type: ignore[attr-defined]


def normalised(text: str) -> list[str]:
    """The words of an answer without case, punctuation and articles.

    Example: normalised("An apple, the pear") -> ['apple', 'pear']"""
    return ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def _best(
    reward: str, texts: Sequence[str], examples: Sequence[Example], compare: Callable[[list[str], list[str]], float]
) -> list[float]:
    known = {reference: normalised(reference) for own in references_of(reward, examples) for reference in own}
    answers = [normalised(text) for text in texts]
    return [
        max(compare(answer, known[reference]) for reference in example.references)
        for answer, example in zip(answers, examples, strict=True)
    ]


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    if not common:
        return 0.0
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)
