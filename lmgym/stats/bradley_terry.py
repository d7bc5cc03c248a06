"""Strengths from comparisons in pairs: the model of Bradley and Terry (Biometrika 39 (1952), 324-345), where i beats j
with probability 1 / (1 + exp(s_j - s_i))."""

import math
from collections.abc import Sequence

ROUNDS = 10_000
CLOSE = 1e-12  # largest change of a strength at which the iteration ends


def bradley_terry(wins: Sequence[Sequence[float]], prior: float = 1.0) -> list[float]:
    """The strengths s [N] of a table `wins[i][j]` [N N]: how often i has beaten j; a tie counts half for both. With
    `prior` each plays so many more games against one of strength 0, half of them won: the strengths are finite whoever
    has won everything. Without it (0) that needs a chain of wins from each to each; their mean is then 0.

    Found by Hunter's iteration (Annals of Statistics 32 (2004), 384-406, eq. 3), which rises to the one maximum.

    Example:
        >>> [round(s, 3) for s in bradley_terry([[0, 3], [1, 0]], prior=0.0)]    # 3 : 1, so log 3 apart
        [0.549, -0.549]
    """
    count = len(wins)
    games = [[wins[i][j] + wins[j][i] for j in range(count)] for i in range(count)]
    won = [math.fsum(wins[i][j] for j in range(count) if j != i) + prior / 2 for i in range(count)]
    worth = [1.0] * count  # exp(s)
    for _ in range(ROUNDS):
        before, worth = worth, [
            won[i] / math.fsum(
                [games[i][j] / (worth[i] + worth[j]) for j in range(count) if j != i] + [prior / (worth[i] + 1.0)]
            )
            if won[i] else 0.0
            for i in range(count)
        ]  # fmt: skip
        if not prior:  # only ratios count
            middle = math.exp(math.fsum(math.log(one) for one in worth) / count)
            worth = [one / middle for one in worth]
        if all(abs(one - other) <= CLOSE * other for one, other in zip(worth, before, strict=True)):
            break
    return [math.log(one) for one in worth]


def beats(strengths: Sequence[float]) -> list[float]:
    """The probability of each to beat another one of them, mean over the others. Their mean is 1/2.

    Example: beats([math.log(3), 0.0]) -> [0.75, 0.25]"""
    others = len(strengths) - 1
    return [
        math.fsum(1.0 / (1.0 + math.exp(two - one)) for j, two in enumerate(strengths) if j != i) / others
        for i, one in enumerate(strengths)
    ]
