"""Bins of calibration, their error and Wilson's interval: by hand, from the literature, and laws that always hold."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.logs.plots.calibration import calibration_plot
from lmgym.stats.calibration import Bin, calibration_bins, calibration_error, wilson_interval

confidences = st.lists(st.floats(0.5, 1.0), min_size=1, max_size=60)


def test_worked_bins() -> None:
    """Bins are open on the left and closed on the right, the first one closed on both sides."""
    found = calibration_bins([0.5, 0.6, 0.61, 1.0, 0.95], [0.5, 1, 0, 1, 0], bins=5)
    assert [(one.low, one.high, one.count, one.right) for one in found] == [
        (0.5, 0.6, 2, 0.75),
        (0.6, 0.7, 1, 0.0),
        (0.9, 1.0, 2, 0.5),
    ]
    # 2/5 |0.75 - 0.55| + 1/5 |0 - 0.61| + 2/5 |0.5 - 0.975|
    assert calibration_error(found) == pytest.approx(0.08 + 0.122 + 0.19, rel=1e-12)


def test_wilson_is_the_textbooks() -> None:
    """Brown, Cai and DasGupta, Statistical Science 16 (2001): the solutions p of (p - share)^2 = z^2 p (1 - p) / n."""
    low, high = wilson_interval(0.5, 10)
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    z = 1.959963984540054
    for share, count in ((0.0, 5), (0.2, 30), (1.0, 7), (0.73, 400)):
        for bound in wilson_interval(share, count):
            assert abs(bound - share) == pytest.approx(z * math.sqrt(bound * (1 - bound) / count), abs=1e-9)


@given(confidences, st.randoms(use_true_random=False))
def test_laws(values: list[float], draw: random.Random) -> None:
    """All decisions are in one bin each, whatever their order; the error lies between |mean right - mean confidence|
    and 1."""
    right = [float(draw.random() < value) for value in values]
    bins = calibration_bins(values, right)
    assert sum(one.count for one in bins) == len(values)
    for one in bins:
        assert one.low - 1e-9 <= one.confidence <= one.high + 1e-9
        assert 0 <= one.right_low <= one.right + 1e-12 and one.right - 1e-12 <= one.right_high <= 1
    order = draw.sample(range(len(values)), len(values))
    assert calibration_bins([values[i] for i in order], [right[i] for i in order]) == bins
    least = abs(math.fsum(right) - math.fsum(values)) / len(values)
    assert least - 1e-9 <= calibration_error(bins) <= 1


def test_a_calibrated_judge_has_a_small_error_and_a_sure_one_has_not() -> None:
    """10,000 decisions: a bin of 1,000 is off by 0.015 at one standard deviation."""
    draw = random.Random(0)
    values = [0.5 + draw.random() / 2 for _ in range(10_000)]
    right = [float(draw.random() < value) for value in values]
    assert calibration_error(calibration_bins(values, right)) < 0.03
    assert calibration_error(calibration_bins([1.0] * len(values), right)) == pytest.approx(0.25, abs=0.02)


def test_what_cannot_be() -> None:
    with pytest.raises(LmgymError, match="3 confidences and 1 decisions"):
        calibration_bins([0.5, 0.6, 0.7], [1.0])
    with pytest.raises(LmgymError, match=r"a confidence must lie between 0\.5 and 1, not 0\.4"):
        calibration_bins([0.9, 0.4], [1.0, 0.0])
    with pytest.raises(LmgymError, match="there is no decision"):
        calibration_error([])


@pytest.mark.slow
def test_the_picture(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("picture") / "new" / "calibration.png"
    bins = [Bin(0.5, 0.55, 3, 0.52, 1.0, 0.44, 1.0), Bin(0.95, 1.0, 40, 0.99, 0.7, 0.55, 0.82)]
    assert calibration_plot(bins, out) == out and out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(LmgymError, match="no decision of a reward model to draw"):
        calibration_plot([], out)
