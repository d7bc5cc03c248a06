"""`majority_answer`: what most answers to a prompt agree on is taken for right, where nobody knows what is right."""

from collections import Counter

from lmgym.core.registry import register
from lmgym.rewards.groups import of_groups
from lmgym.types import Example


@register("reward", "majority_answer")
@of_groups
def majority_answer(
    texts: list[list[str]], examples: list[Example], *, latex: bool = False
) -> list[list[float | None]]:
    """1 if the final answer is the one that most answers of the group have, else 0: the pseudo-labels of TTRL (arXiv
    2504.16084, section 2.2). Finalists of equal number are all right. A group in which no two agree is not judged.

    Final answers are read and compared as by `final_answer`; with `latex` as by `math_equal`. References are not read.
    A model that agrees with itself in error learns the error: hold a real reward on held-out problems beside it.

    Example: majority_answer([["#### 7", "it is 7", "#### 8"]], [example]) -> [[1.0, 1.0, 0.0]]"""
    if latex:
        from lmgym.rewards.maths.math_equal import vote_of  # needs lmgym[maths]
    else:
        from lmgym.rewards.maths.final_answer import vote_of
    return [_of_group([vote_of(text) for text in group]) for group in texts]


def _of_group(votes: list[str | None]) -> list[float | None]:
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    if most < 2:
        return [None] * len(votes)
    return [float(vote is not None and counts[vote] == most) for vote in votes]
