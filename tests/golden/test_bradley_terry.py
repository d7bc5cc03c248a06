"""Strengths from pairs against published numbers, the equations that define them, and closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.stats.bradley_terry import beats, bradley_terry

# American League, eastern division, 1987: Agresti, Categorical Data Analysis, Bradley-Terry example. Wins of the row
# over the column: Milwaukee, Detroit, Toronto, New York, Boston, Cleveland, Baltimore.
BASEBALL = [
    [0, 7, 9, 7, 7, 9, 11],
    [6, 0, 7, 5, 11, 9, 9],
    [4, 6, 0, 7, 7, 8, 12],
    [6, 8, 6, 0, 6, 7, 10],
    [6, 2, 6, 7, 0, 7, 12],
    [4, 4, 5, 6, 6, 0, 6],
    [2, 4, 1, 3, 1, 7, 0],
]
PUBLISHED = [1.58, 1.44, 1.29, 1.25, 1.11, 0.68, 0.0]  # above Baltimore


def test_published_strengths() -> None:
    found = bradley_terry(BASEBALL, prior=0.0)
    assert [round(one - found[-1], 2) for one in found] == PUBLISHED


@pytest.mark.parametrize(("won", "lost"), [(3, 1), (1, 1), (2, 7)])
def test_two_are_apart_by_the_logarithm_of_their_odds(won: int, lost: int) -> None:
    one, other = bradley_terry([[0, won], [lost, 0]], prior=0.0)
    assert one - other == pytest.approx(math.log(won / lost), abs=1e-9)
    assert one + other == pytest.approx(0.0, abs=1e-12)


TABLES = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(TABLES, st.sampled_from([0.5, 1.0, 3.0]))
def test_each_is_expected_to_win_what_it_won(wins: list[list[int]], prior: float) -> None:
    """The likelihood's derivative is 0 at its maximum: expected and real wins agree, those of the prior among them."""
    s, count = bradley_terry(wins, prior), len(wins)
    for i in range(count):
        games = [(wins[i][j] + wins[j][i], s[j]) for j in range(count) if j != i] + [(prior, 0.0)]
        expected = math.fsum(played / (1.0 + math.exp(other - s[i])) for played, other in games)
        won = sum(wins[i][j] for j in range(count) if j != i) + prior / 2
        assert expected == pytest.approx(won, abs=1e-8)


def test_the_unbeaten_and_the_unasked_have_finite_strengths() -> None:
    one, other, third = bradley_terry([[0, 9, 0], [0, 0, 0], [0, 0, 0]])
    assert one > third > other and max(map(abs, (one, other, third))) < 10
    assert bradley_terry([[0, 0], [0, 0]]) == [0.0, 0.0]


def test_beats_is_a_mean_of_probabilities() -> None:
    assert beats([math.log(3), 0.0]) == pytest.approx([0.75, 0.25])
    assert sum(beats([0.3, -2.0, 1.1, 0.0])) == pytest.approx(2.0)
