"""The two tables of `lmgym compare`: the means of both sides, and their paired differences."""

from collections.abc import Mapping

from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal
from lmgym.stats.intervals import direction
from lmgym.stats.paired import Paired


def print_means(title: str, metrics: Mapping[str, Paired], console: Console) -> None:
    """Print the mean of each metric on both sides, with its interval."""
    rows = [(name, str(result.first), str(result.second)) for name, result in metrics.items()]
    console.table(title, ("metric", "A", "B"), rows)


def print_differences(title: str, metrics: Mapping[str, Paired], better: Mapping[str, int], console: Console) -> None:
    """Print the differences, what their intervals show (bold where 0 is outside), p, and how many are higher where."""
    rows, apart = [], []
    for index, (name, result) in enumerate(metrics.items()):
        counts = (result.higher_first, result.equal, result.higher_second)
        p = "<0.001" if result.p < 0.001 else decimal(result.p)
        word = "unclear" if result.difference.has_bounds else "-"
        if result.difference.low > 0 or result.difference.high < 0:
            word = direction(result.difference.mean, better.get(name, 0))
            apart.append(index)
        numbers = "-" if None in counts else ", ".join(map(str, counts))
        rows.append((name, str(result.difference), word, p, numbers))
    console.table(title, ("metric", "B - A", "B", "p", "A higher, equal, B higher"), rows, bold=apart)
