"""Numbers, times and texts as a person reads them.

Text that a model or a data set wrote is shown as it is: never read as markup, and its control characters
replaced by visible signs, so that it cannot colour, clear or retitle the terminal.
"""

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

ACCURACIES = ("final_answer", "exact_match")  # metrics that the live line calls accuracy
JOINERS = "\u200c\u200d"  # invisible, but part of ordinary words and emoji


def status(
    record: Mapping[str, Any],
    step: int,
    steps: int,
    seconds_left: float | None,
    held_out: tuple[str, float] | None = None,
) -> list[str]:
    """The words of the live line: step, reward (or loss), accuracy, tokens/s, time left, truncated share.

    Accuracy is the last evaluation's first metric (`held_out`: its name and mean), and before there is one
    the first part of the train reward, then called so. The first five words fit 80 columns.

    Example:
        >>> status({"reward": 0.5, "tokens_per_second/rollout": 12e3}, 12, 200, 151.0, ("final_answer", 0.61))
        ['step  13/200', 'reward 0.500', 'accuracy 0.610', '12.0k tokens/s', '02:31 left']
    """
    words = [f"step {step + 1:>{len(str(steps))}}/{steps}"]
    losses = [name for name in record if name == "loss" or name.startswith("loss/")]
    if "reward" in record or not losses:
        words.append(f"reward {decimal(number(record, 'reward'))}")
    else:
        words.append(f"loss {decimal(number(record, losses[0]))}")
    parts = [name for name in record if name.startswith("reward/")]
    if held_out:
        label = "held-out reward" if held_out[0] == "reward" else _label(held_out[0])
        words.append(f"{label} {decimal(held_out[1])}")
    elif parts:
        name = _label(parts[0].removeprefix("reward/"))
        words.append(f"train {name} {decimal(number(record, parts[0]))}")
    speed = number(record, "tokens_per_second/rollout") or number(record, "tokens_per_second/update")
    words.append(f"{_thousands(speed)} tokens/s")
    words.append(f"{duration(seconds_left)} left")
    truncated = number(record, "truncated")
    if truncated is not None and truncated >= 0.005:
        words.append(f"truncated {truncated:.0%}")
    return words


def duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours where there are any; "--:--" for None.

    Example:
        >>> duration(151.2), duration(3723), duration(None)
        ('02:31', '1:02:03', '--:--')
    """
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes:02d}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def visible(text: str) -> str:
    """The text with every control and invisible character replaced by a sign that does nothing.

    Example:
        >>> visible("a\\x1b[2Jb\\n")
        'a␛[2Jb⏎'
    """
    return "".join(_visible(character) for character in text)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning and, since the answer stands there, the end, with … between.

    Example:
        >>> shorten("0123456789", 7)
        '0123…89'
    """
    if len(text) <= limit:
        return text
    tail = max(0, limit - 1) * 2 // 5
    return text[: max(0, limit - 1 - tail)] + "…" + (text[-tail:] if tail else "")


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\u2028\u2029":
        return "⏎"
    if character == "\t":
        return " "
    if code < 0x20:
        return chr(0x2400 + code)
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in JOINERS
    return "\ufffd" if hidden else character


def _label(metric: str) -> str:
    return "accuracy" if metric in ACCURACIES else metric


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a record, or None."""
    value = record.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


def decimal(value: float | None) -> str:
    """Three digits, and "-" for what is missing or not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def json_text(tree: Any) -> str:
    """A tree of plain values as the text of a JSON file; what is not finite, which JSON does not have, is null. Half a
    surrogate pair, which UTF-8 does not have, makes all of it ASCII with escapes."""
    text = json.dumps(_finite(tree), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    halves = any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(_finite(tree), indent=1, allow_nan=False) + "\n" if halves else text


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
