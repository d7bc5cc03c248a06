"""Spearman's rank correlation against scipy's number and by hand."""

import math

import pytest

from lmgym.stats.rank_correlation import spearman


def test_scipys_number() -> None:
    """scipy.stats.spearmanr([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]), from its documentation."""
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233, abs=1e-15)


def test_by_hand() -> None:
    assert spearman([3, 1, 2], [30, 10, 20]) == 1.0 and spearman([3, 1, 2], [-3, -1, -2]) == -1.0
    assert spearman([1, 1, 2], [5, 6, 7]) == pytest.approx(math.sqrt(3) / 2)  # ranks 1.5, 1.5, 3
    assert math.isnan(spearman([1, 1], [1, 2]))
