"""Record what scipy and statsmodels make of paired numbers, for test_paired.py, which needs neither.

A developer runs it in an environment of its own, and it replaces paired.json:

    python3 -m venv scipy && scipy/bin/pip install scipy==1.17.1 statsmodels==0.15.0
    scipy/bin/python tests/golden/record_paired.py

Tango's interval is in neither library. Here it is found from its definition alone: the chances that maximise the
multinomial likelihood under a given difference by numerical search, and the roots of the score statistic by Brent's
method.
"""

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar

RECORD = Path(__file__).with_name("paired.json")
RANDOM = np.random.default_rng(20251121)
COUNTS = [(6, 16, 161), (1, 7, 21), (40, 20, 160), (0, 0, 40), (3, 0, 12), (0, 9, 9), (250, 190, 1319), (1, 1, 2)]


def score_interval(gained: int, lost: int, pairs: int, confidence: float) -> list[float]:
    z = stats.norm.ppf((1 + confidence) / 2)

    def excess(d: float) -> float:
        """How far the observed difference lies from d, in standard errors under d, beyond z."""

        def surprise(chance: float) -> float:
            parts = [(gained, chance + d), (lost, chance), (pairs - gained - lost, 1 - 2 * chance - d)]
            return -sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

        low, high = max(0.0, -d), (1 - d) / 2
        chance = optimize.minimize_scalar(surprise, bounds=(low, high), method="bounded", options={"xatol": 1e-13}).x
        error = math.sqrt(max((2 * chance + d - d * d) / pairs, 1e-300))
        return abs((gained - lost) / pairs - d) / error - z

    estimate = (gained - lost) / pairs
    edge = 1e-9
    bounds = []
    for outer in (-1.0, 1.0):
        inner = estimate + math.copysign(edge, outer)
        beyond = outer - math.copysign(edge, outer)
        bounds.append(outer if estimate == outer else optimize.brentq(excess, *sorted((inner, beyond)), xtol=1e-12))
    return bounds


def main() -> None:
    record: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("scipy", "statsmodels", "numpy")}
    record["mcnemar"] = [
        {"counts": counts, "p": float(mcnemar([[0, counts[0]], [counts[1], 0]], exact=True).pvalue)}
        for counts in [(6, 16), (1, 7), (0, 5), (5, 5), (250, 190), (12, 2), (1, 0), (3000, 3100)]
    ]
    record["score"] = [
        {"counts": counts, "confidence": level, "interval": score_interval(*counts, level)}
        for counts in COUNTS
        for level in (0.95, 0.9)
    ]
    record["sign flip"] = []
    for size, step in ((2, 0.0), (5, 0.0), (9, 0.0), (12, 0.25), (40, 0.0), (300, 0.125)):
        values = RANDOM.normal(0.15, 0.5, size)
        values = np.round(values / step) * step if step else values  # with ties, and differences of 0
        tried = np.inf if size <= 12 else 400_000
        found = stats.permutation_test(
            (values,), np.sum, permutation_type="samples", n_resamples=tried, batch=20_000, random_state=1
        )
        record["sign flip"].append({"values": values.tolist(), "exact": size <= 12, "p": float(found.pvalue)})
    record["student t"] = []
    for size in (2, 3, 4, 5, 6, 10, 31, 200):
        values = RANDOM.normal(0.6, 0.05, size)
        for level in (0.95, 0.99):
            bounds = stats.t.interval(level, size - 1, values.mean(), stats.sem(values))
            case = {"values": values.tolist(), "confidence": level, "interval": [float(bound) for bound in bounds]}
            record["student t"].append(case)
    record["paired t"] = []
    for size in (2, 3, 4, 5, 6, 10, 31):
        first, second = RANDOM.normal(0.6, 0.05, size), RANDOM.normal(0.63, 0.05, size)
        found = stats.ttest_rel(second, first)
        bounds = [float(bound) for bound in found.confidence_interval(0.95)]
        values = {"first": first.tolist(), "second": second.tolist()}
        record["paired t"].append({**values, "p": float(found.pvalue), "interval": bounds})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


main()
