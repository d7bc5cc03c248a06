"""How often confidence intervals cover the truth, simulated: those of lmgym/stats beside others of the literature.

    python3 -m venv scipy && scipy/bin/pip install numpy==2.4.6 scipy==1.17.1
    scipy/bin/python -m benchmarks.intervals

Prints markdown. A cell is the lowest and the mean coverage of a nominal 95 % over all settings of its row, and the mean
width. An interval that is absent is left out.

Shares: a prompt's own rate is beta distributed around the rate, so that two samples of it correlate by RHO.
Differences: the second model has the first one's rate, or with a chance another, and then solves a part of the rest.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from scipy import stats

from lmgym.stats.intervals import Interval, SufficientStatistics, mean_interval, student_t, sums_interval
from lmgym.stats.paired import tango

Values = np.ndarray  # [draws prompts]: each prompt's mean of its samples
Bounds = tuple[np.ndarray, np.ndarray]
PROMPTS, SAMPLES = (3, 5, 10, 20, 50, 200), (1, 4, 8)
RATES, RHO = (0.01, 0.03, 0.1, 0.3, 0.5), (0.0, 0.2, 0.6, 1.0)
Z = float(stats.norm.ppf(0.975))
RANDOM = np.random.default_rng(0)


def bounds_of(intervals: list[Interval]) -> Bounds:
    return np.array([one.low for one in intervals]), np.array([one.high for one in intervals])


def of_shares(values: Values, samples: int) -> Bounds:
    """lmgym's own for right or wrong answers."""
    return bounds_of([mean_interval([[value] for value in row], shares=True) for row in values.tolist()])


def of_values(values: Values, samples: int) -> Bounds:
    """lmgym's own for other values."""
    return bounds_of([student_t(row) for row in values.tolist()])


def wilson(values: Values, samples: int, effective: bool = False) -> Bounds:
    """Wilson's score interval; the prompts are the trials, or as many as the variance between prompts says."""
    share, trials = values.mean(1), trials_of(values, samples) if effective else np.full(len(values), values.shape[1])
    centre, scale = share + Z * Z / (2 * trials), 1 + Z * Z / trials
    half = Z * np.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    return (centre - half) / scale, (centre + half) / scale


def korn_graubard(values: Values, samples: int) -> Bounds:
    """Clopper and Pearson's interval of the effective number of trials, with t in place of z: Survey Methodology 24
    (1998), 193-201."""
    prompts = values.shape[1]
    shrunk = (stats.t.ppf(0.975, prompts * samples - 1) / stats.t.ppf(0.975, prompts - 1)) ** 2
    trials = trials_of(values, samples) * shrunk
    right = values.mean(1) * trials
    low = np.where(right > 1e-9, stats.beta.ppf(0.025, np.maximum(right, 1e-9), trials - right + 1), 0.0)
    high = np.where(trials - right > 1e-9, stats.beta.ppf(0.975, right + 1, np.maximum(trials - right, 1e-9)), 1.0)
    return low, high


def trials_of(values: Values, samples: int) -> np.ndarray:
    """p (1 - p) over the variance of the mean: as many independent trials vary as much (Kish's design effect)."""
    share, prompts = values.mean(1), values.shape[1]
    variance = values.var(1, ddof=1) / prompts
    trials = np.divide(share * (1 - share), variance, out=np.full(len(values), float(prompts)), where=variance > 0)
    return np.clip(trials, prompts, prompts * samples)


def before(values: Values, samples: int) -> Bounds:
    """What lmgym had before: Wilson's with one sample a prompt and if all shares are equal, else the percentile
    bootstrap."""
    if samples == 1:
        return wilson(values, samples)
    equal = np.ptp(values, axis=1) == 0
    pairs = zip(wilson(values, samples), percentile(values, samples), strict=True)
    low, high = (np.where(equal, one, other) for one, other in pairs)
    return low, high


def percentile(values: Values, samples: int) -> Bounds:
    """The percentile bootstrap over prompts."""
    low, high = np.quantile(resampled(values)[0], [0.025, 0.975], axis=1)
    return _absent(values, low, high)


def bootstrap_t(values: Values, samples: int) -> Bounds:
    """The studentised bootstrap (Efron & Tibshirani 1993, chapter 12)."""
    means, deviations = resampled(values)
    centre, error = values.mean(1), values.std(1) / math.sqrt(values.shape[1])
    off = means - centre[:, None]
    scaled = np.divide(off * math.sqrt(values.shape[1]), deviations, out=np.sign(off) * 1e9, where=deviations > 1e-12)
    low, high = np.quantile(scaled, [0.025, 0.975], axis=1)
    return _absent(values, centre - high * error, centre - low * error)


def resampled(values: Values, resamples: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations [draws resamples]."""
    prompts = values.shape[1]
    weights = RANDOM.multinomial(prompts, np.full(prompts, 1 / prompts), resamples).T / prompts
    means = values @ weights
    return means, np.sqrt(np.maximum(values**2 @ weights - means**2, 0))


def tangos(differences: Values, samples: int) -> Bounds:
    gained, lost = (differences > 0).sum(1), (differences < 0).sum(1)
    known = {pair: tango(*pair, differences.shape[1]) for pair in set(zip(gained.tolist(), lost.tolist(), strict=True))}
    return bounds_of([known[pair] for pair in zip(gained.tolist(), lost.tolist(), strict=True)])


def _absent(values: Values, low: np.ndarray, high: np.ndarray) -> Bounds:
    """Without a width there is none."""
    equal = np.ptp(values, axis=1) == 0
    return np.where(equal, math.nan, low), np.where(equal, math.nan, high)


def rates(draws: int, prompts: int, rate: float, rho: float) -> np.ndarray:
    if rho in (0.0, 1.0):
        return np.full((draws, prompts), rate) if rho == 0 else (RANDOM.random((draws, prompts)) < rate) * 1.0
    return RANDOM.beta(rate * (1 / rho - 1), (1 - rate) * (1 / rho - 1), (draws, prompts))


def shares(draws: int, prompts: int, samples: tuple[int, ...]) -> Iterator[tuple[Values, int, float]]:
    for each, rate, rho in product(samples, RATES, RHO):
        if each > 1 or rho == 0:
            yield RANDOM.binomial(each, rates(draws, prompts, rate, rho)) / each, each, rate


def values(draws: int, prompts: int, samples: tuple[int, ...]) -> Iterator[tuple[Values, int, float]]:
    size = (draws, prompts)
    if samples == ("symmetric",):
        yield RANDOM.normal(3, 2, size), 1, 3.0
        yield RANDOM.random(size), 1, 0.5
    else:
        yield RANDOM.exponential(1, size), 1, 1.0
        yield np.minimum(RANDOM.geometric(0.02, size), 256) * 1.0, 1, (1 - 0.98**256) / 0.02  # lengths, cut at 256


def differences(draws: int, prompts: int, samples: tuple[int, ...]) -> Iterator[tuple[Values, int, float]]:
    for each, rate, more, other, rho in product(samples, RATES[1:], (0.0, 0.05, 0.2), (0.0, 0.2), (0.2, 0.8)):
        first = rates(draws, prompts, rate, rho)
        changed = RANDOM.random((draws, prompts)) < other
        second = np.where(changed, rates(draws, prompts, rate, rho), first)
        second = second + more * (1 - second)
        drawn = RANDOM.binomial(each, second) - RANDOM.binomial(each, first)
        yield drawn / each, each, more * (1 - rate)


def table(
    title: str,
    made: Callable[[int, int, tuple], Iterator[tuple[Values, int, float]]],
    methods: dict[str, Callable[[Values, int], Bounds]],
    samples: tuple,
    draws: int,
    prompts: tuple[int, ...] = PROMPTS,
) -> None:
    print(f"\n{title}\n\n| prompts | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}")
    for count in prompts:
        cells: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for data, each, truth in made(draws, count, samples):
            for name, method in methods.items():
                low, high = method(data, each)
                known = ~np.isnan(low)
                if known.sum() >= draws / 20:  # else too few to say
                    covers = (low[known] <= truth + 1e-12) & (high[known] >= truth - 1e-12)
                    cells[name].append((float(covers.mean()), float(np.median(high[known] - low[known]))))
        shown = []
        for own in cells.values():
            coverages, widths = zip(*own, strict=True)
            shown.append(f"{min(coverages):.3f}, {np.mean(coverages):.3f} ({np.mean(widths):.3g})")
        print(f"| {count} | {' | '.join(shown)} |", flush=True)


def exact_table() -> None:
    """The lowest coverage with one sample a prompt, from the binomial distribution: nothing is drawn."""
    every = np.geomspace(1e-4, 0.5, 800)[:, None]
    print("\nRight or wrong, one sample a prompt, exactly\n\n| prompts | lmgym | Wilson |\n|---|---|---|")
    for prompts in PROMPTS:
        right = np.arange(prompts + 1)
        outcomes = (np.arange(prompts) < right[:, None]) * 1.0
        chances, shown = stats.binom.pmf(right, prompts, every), []
        for method in (of_shares, wilson):
            low, high = method(outcomes, 1)
            covered = (chances * ((low <= every + 1e-12) & (every <= high + 1e-12))).sum(1)
            shown.append(f"{covered.min():.3f} (at {every[covered.argmin(), 0]:.4f})")
        print(f"| {prompts} | {' | '.join(shown)} |")


def corpus_table(draws: int) -> None:
    """A figure of sums like BLEU: the geometric mean of two shares of counts."""

    def value(sums: np.ndarray) -> np.ndarray:
        return np.sqrt(sums[..., 0] / sums[..., 1] * sums[..., 2] / sums[..., 3])

    def made(draws: int, prompts: int) -> np.ndarray:
        words = np.maximum(RANDOM.poisson(RANDOM.gamma(4, 5, (draws, prompts))), 2)
        quality = RANDOM.beta(3, 3, (draws, prompts))
        right = RANDOM.binomial(words, quality)
        return np.stack([right, words, RANDOM.binomial(np.minimum(right, words - 1), quality), words - 1], 2) * 1.0

    truth = float(value(made(200, 20_000).sum((0, 1))))
    print("\nA corpus figure of sums\n\n| prompts | jackknife and t (lmgym) | percentile bootstrap |\n|---|---|---|")
    for prompts in PROMPTS:
        rows = made(draws, prompts)
        own = bounds_of([sums_interval(SufficientStatistics(one, value)) for one in rows])
        weights = RANDOM.multinomial(prompts, np.full(prompts, 1 / prompts), 1000) * 1.0
        drawn = value(np.einsum("bn,rnk->rbk", weights, rows))
        low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
        shown = []
        for lower, upper in (own, (low, high)):
            covers = (lower <= truth) & (truth <= upper)
            shown.append(f"{covers[~np.isnan(lower)].mean():.3f} ({np.nanmedian(upper - lower):.3g})")
        print(f"| {prompts} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    of_rates = {
        "two prompts added, t (lmgym)": of_shares,
        "Wilson, prompts as trials": wilson,
        "Wilson, effective trials": lambda data, each: wilson(data, each, effective=True),
        "Korn and Graubard": korn_graubard,
        "before: Wilson, or percentile bootstrap": before,
    }
    table("Right or wrong, one sample a prompt", shares, of_rates, (1,), draws)
    table("Right or wrong, four or eight samples a prompt", shares, of_rates, (4, 8), draws)
    exact_table()
    of_scores = {"Student's t (lmgym)": of_values, "percentile bootstrap": percentile, "bootstrap-t": bootstrap_t}
    table("Symmetric values (normal, uniform)", values, of_scores, ("symmetric",), draws)
    table("Skewed values (exponential, lengths cut at 256)", values, of_scores, ("skewed",), draws)
    single = {"Tango's score (lmgym)": tangos, "Student's t": of_values, "percentile bootstrap": percentile}
    table("Difference of two models, one right-or-wrong answer each", differences, single, (1,), draws)
    table("Difference of two models, four or eight samples each", differences, of_scores, (4, 8), draws)
    corpus_table(draws)


if __name__ == "__main__":
    main()
