"""Change points against a fit by brute force, and how often chance alone looks like one."""

import numpy as np
import pytest

from lmgym.core import seeds
from lmgym.stats import change_point as module
from lmgym.stats.change_point import LEAST, change_point, outlier


def by_hand(curve: np.ndarray) -> tuple[int, float]:
    """The best place and its F, by numpy's least squares at every place."""

    def squares(values: np.ndarray) -> float:
        columns = np.stack([np.ones(len(values)), np.arange(len(values))], axis=1)
        fitted = columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
        return float(((values - fitted) ** 2).sum())

    one, count = squares(curve), len(curve)
    found = {}
    for place in range(LEAST, count - LEAST + 1):
        two = squares(curve[:place]) + squares(curve[place:])
        found[place] = (one - two) / 2 / (two / (count - 4))
    best = max(found, key=lambda place: found[place])
    return best, found[best]


@pytest.mark.parametrize("count", [10, 11, 37, 120])
def test_place_and_statistic_are_those_of_least_squares(count: int) -> None:
    generator = np.random.default_rng(count)
    for shift in (0.0, 4.0, 1e3):
        curve = generator.normal(size=count) + shift * (np.arange(count) >= count // 2) + 0.1 * np.arange(count)
        place, statistic = by_hand(curve)
        found = change_point(list(curve), draws=9)
        assert found is not None and found.place == place and found.f == pytest.approx(statistic, rel=1e-4)


def test_a_jump_and_a_bend_are_found_where_they_are() -> None:
    noise = np.random.default_rng(0).normal(size=80) * 0.1
    jump = change_point(list(noise + 2.0 * (np.arange(80) >= 50)))
    assert jump is not None and jump.place == 50 and jump.p < 0.01 and jump.jump == pytest.approx(2, abs=0.2)
    bend = change_point(list(noise + np.maximum(np.arange(80) - 30, 0) * 0.1))
    assert bend is not None and abs(bend.place - 30) <= 2 and bend.p < 0.01
    assert bend.slopes == pytest.approx((0, 0.1), abs=0.02)


def test_chance_is_rarely_a_change() -> None:
    """40 curves with p <= 0.05 each by chance: more than 6 of them have a probability below 1 in 100 (binomial); the
    same of neighbours that resemble each other, where p is a little too small: 10."""
    for memory, most in ((0.0, 6), (0.5, 10)):
        generator, found = np.random.default_rng(1), 0
        for _ in range(40):
            noise = generator.normal(size=50)
            for at in range(1, 50):
                noise[at] += memory * noise[at - 1]
            point = change_point(list(noise + 0.05 * np.arange(50)), draws=199)
            found += point is not None and point.p <= 0.05
        assert found <= most


def test_long_curves_of_noise_are_drawn_by_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, a curve of 100,000 numbers would take minutes; the numbers are the same."""
    curve = list(np.random.default_rng(3).normal(size=50) + 0.8 * (np.arange(50) >= 20))
    before, drawn = change_point(curve), list[int]()

    class Counted(np.random.Generator):
        def normal(self, *, size: tuple[int, int]) -> np.ndarray:  # type: ignore[override]
            drawn.append(size[0])
            return super().normal(size=size)

    generator = seeds.generator
    monkeypatch.setattr(seeds, "generator", lambda *path: Counted(generator(*path).bit_generator))
    monkeypatch.setattr(module, "CELLS", 60)
    assert change_point(curve) == before and before is not None and before.p > 0.001
    assert drawn == [64] * 15 + [39]


def test_what_has_no_change() -> None:
    assert change_point([1.0] * 30) is None and change_point([1.0, 2.0] * 4) is None
    assert change_point([1.0, float("nan")] * 10) is None and change_point([]) is None


def test_one_number_that_stands_alone() -> None:
    curve = list(np.random.default_rng(2).normal(size=30))
    assert outlier(curve) is None and outlier(curve[:9]) is None
    curve[17] = 40.0
    assert outlier(curve) == 17
