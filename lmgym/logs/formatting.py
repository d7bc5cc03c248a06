"""Numbers, durations and tables in a readable form."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len

from lmgym.core.visible import escaped, visible

ACCURACIES = ("final_answer", "exact_match")  # metrics with the label accuracy in the live line


def status(
    record: Mapping[str, Any],
    step: int,
    steps: int,
    seconds_left: float | None,
    held_out: tuple[str, float] | None = None,
) -> list[str]:
    """The words of the live line: step, the step's reward (or loss), accuracy, tokens/s, time left, truncated share.

    Accuracy is the first metric of the last evaluation (`held_out`: its name and mean), and is called held-out: the
    step's own reward stands beside it. Before the first evaluation it is the first component of the train reward, with
    the label "train". The first five words fit into 80 columns.

    Example:
        >>> status({"reward": 0.5, "tokens_per_second/rollout": 12e3}, 12, 200, 151.0, ("final_answer", 0.61))
        ['step  13/200', 'reward 0.500', 'held-out accuracy 0.610', '12.0k tokens/s', '02:31 left']
    """
    words = [f"step {step + 1:>{len(str(steps))}}/{steps}"]
    losses = [name for name in record if name == "loss" or name.startswith("loss/")]
    if "reward" in record or not losses:
        words.append(f"reward {decimal(number(record, 'reward'))}")
    else:
        words.append(f"loss {decimal(number(record, losses[0]))}")
    components = [name for name in record if name.startswith("reward/")]
    if held_out:
        words.append(f"held-out {_label(held_out[0])} {decimal(held_out[1])}")
    elif components:
        name = _label(components[0].removeprefix("reward/"))
        words.append(f"train {name} {decimal(number(record, components[0]))}")
    speed = number(record, "tokens_per_second/rollout") or number(record, "tokens_per_second/update")
    words.append(f"{_thousands(speed)} tokens/s")
    words.append(f"{duration(seconds_left)} left")
    truncated = number(record, "truncated")
    if truncated is not None and truncated >= 0.005:
        words.append(f"truncated {truncated:.0%}")
    return words


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None = None
) -> tuple[list[str], list[list[str]]]:
    """A table as the lines of its head and the lines of each row. It has at most `columns` columns of characters, if
    that can be: headings are wrapped between words, and where that is not enough, each row becomes a list, so that no
    cell is ever cut.

    Example:
        >>> table_lines(("metric", "after"), [("reward", "0.412")])
        (['  metric   after', ' ────────────────'], [['  reward   0.412']])
        >>> table_lines(("metric", "after"), [("reward", "0.412")], columns=12)
        ([], [['  metric: reward', '    after: 0.412']])
    """
    cells = [list(map(visible, row)) for row in rows]
    longest = [max((cell_len(row[place]) for row in cells), default=0) for place in range(len(headings))]
    words = [max(map(cell_len, heading.split()), default=0) for heading in headings]
    whole = [max(pair) for pair in zip(longest, map(cell_len, headings), strict=True)]
    narrow = [max(pair) for pair in zip(longest, words, strict=True)]
    for widths, gap in ((whole, 3), (narrow, 3), (narrow, 2)):
        total = sum(widths) + gap * (len(widths) - 1)
        if columns is None or 2 + total <= columns:
            wrapped = [textwrap.wrap(heading, width) or [""] for heading, width in zip(headings, widths, strict=True)]
            upwards = zip_longest(*(lines[::-1] for lines in wrapped), fillvalue="")  # their last lines are level
            heads = [*upwards][::-1]
            head = [*(_joined(line, widths, gap) for line in heads), " " + "─" * (total + 1)]
            return head, [[_joined(row, widths, gap)] for row in cells]
    lists = [[f"{heading}: {cell}" for heading, cell in zip(headings, row, strict=True)] for row in cells]
    return [], [[f"  {first}", *_packed(others, columns or 0)] for first, *others in lists]


def _packed(fields: Sequence[str], columns: int) -> list[str]:
    """The fields of a list, indented: on one line if that fits, else on a line each."""
    together = "    " + "   ".join(fields)
    return [together] if fields and cell_len(together) <= columns else [f"    {field}" for field in fields]


def _joined(cells: Sequence[str], widths: Sequence[int], gap: int) -> str:
    padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
    return ("  " + (" " * gap).join(padded)).rstrip()


def duration(seconds: float | None) -> str:
    """Minutes and seconds, from one hour on with hours; "--:--" for None.

    Example:
        >>> duration(151.2), duration(3723), duration(None)
        ('02:31', '1:02:03', '--:--')
    """
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes:02d}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning and the end (answers are often there), with … between.

    Example:
        >>> shorten("0123456789", 7)
        '0123…89'
    """
    if len(text) <= limit:
        return text
    tail = max(0, limit - 1) * 2 // 5
    return text[: max(0, limit - 1 - tail)] + "…" + (text[-tail:] if tail else "")


def _label(metric: str) -> str:
    return "accuracy" if metric in ACCURACIES else metric


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record; None if it is missing, NaN or infinite."""
    value = record.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


def decimal(value: float | None) -> str:
    """The number with three decimals; "-" for None, NaN and infinity."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def json_text(tree: Any) -> str:
    """A tree of plain values as the text of a JSON file. NaN and infinity, which JSON lacks, become null; characters
    that cannot be seen, and halves of surrogate pairs, which UTF-8 lacks, are escapes."""
    return escaped(json.dumps(_finite(tree), indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def json_bytes(tree: Any) -> bytes:
    """A tree as compact JSON of ASCII; NaN and infinity become null."""
    try:
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(tree), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _thousands(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
