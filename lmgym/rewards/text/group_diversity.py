"""`group_diversity`: how different an answer is from the others to the same prompt."""

from collections import Counter
from statistics import fmean as mean

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.groups import of_groups
from lmgym.rewards.text.references import Tokens, grams, in_common, tokenise
from lmgym.types import Example


@register("reward", "group_diversity")
@of_groups
def group_diversity(
    texts: list[list[str]], examples: list[Example], *, n: int = 2, punctuation: bool = True, tokens: Tokens = "words"
) -> list[list[float | None]]:
    """1 less the mean similarity to each other answer of the group, from 0 (all are equal) to 1: similarity is Dice's
    coefficient of the runs of 1 to `n` words, 2 |A and B| / (|A| + |B|) as multisets. A group of one is not judged.

    Alone it pays for nonsense, which resembles nothing: give it a small weight beside a reward that knows what is good.
    Sources: Dice 1945; as a reward beside quality: arXiv 2509.02534, which compares meanings in place of words.

    Example: group_diversity([["a b", "a b", "c d"]], [example]) -> [[0.5, 0.5, 1.0]]"""
    if n < 1:
        raise LmgymError(f"key 'rewards.group_diversity.n' must be at least 1, not {n}")
    return [_of_group([_runs(tokenise(text, tokens, punctuation), n) for text in group]) for group in texts]


def _runs(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for length in range(1, n + 1):
        found.update(grams(words, length))
    return found


def _of_group(group: list[Counter[tuple[str, ...]]]) -> list[float | None]:
    if len(group) < 2:
        return [None] * len(group)
    return [1 - mean(_dice(one, other) for other in group if other is not one) for one in group]


def _dice(one: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> float:
    both = one.total() + other.total()
    return 2 * in_common(one, other) / both if both else 1.0  # two empty texts are equal
