"""Reads VADER's list of rated words, from a file or an installed package. The list is not a part of lmgym."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text


@dataclass(frozen=True)
class Lexicon:
    """Ratings of words and emoticons from -4 to 4, and what emoji mean in words.

    Example: Lexicon(ratings={"good": 1.9}, emoji={"\\U0001f600": "grinning face"})"""

    ratings: Mapping[str, float]
    emoji: Mapping[str, str]


@lru_cache(maxsize=4)
def load_lexicon(given: str | None = None) -> Lexicon:
    """The lexicon of a file or folder; by default that of the package vaderSentiment, else of NLTK's data.

    Raises LmgymError if none is found, or if a line cannot be read.

    Example: load_lexicon().ratings["good"] -> 1.9"""
    if given is not None:
        path = Path(given)
        return _folder(path) if path.is_dir() else Lexicon(_rated(_text(path), path), {})
    package = importlib.util.find_spec("vaderSentiment")
    if package is not None and package.submodule_search_locations:
        return _folder(Path(package.submodule_search_locations[0]))
    if importlib.util.find_spec("nltk") is not None:
        import nltk.data

        name = "sentiment/vader_lexicon.zip/vader_lexicon/vader_lexicon.txt"
        try:
            return Lexicon(_rated(str(nltk.data.load(name, format="text")), Path(name)), {})
        except LookupError:
            pass
    raise LmgymError(
        "reward 'vader' needs its list of words: pip install vaderSentiment, or set rewards.vader.lexicon to a folder "
        "with vader_lexicon.txt"
    )


def _folder(folder: Path) -> Lexicon:
    words, emoji = folder / "vader_lexicon.txt", folder / "emoji_utf8_lexicon.txt"
    described = _columns(_text(emoji), emoji) if emoji.is_file() else []
    return Lexicon(_rated(_text(words), words), dict(described))


def _rated(text: str, path: Path) -> dict[str, float]:
    ratings = {}
    for word, value in _columns(text, path):
        try:
            ratings[word] = float(value)
        except ValueError:
            raise LmgymError(
                f"key 'rewards.vader.lexicon': the rating {value!r} of {word!r} in {path} is no number"
            ) from None
    return ratings


def _columns(text: str, path: Path) -> list[tuple[str, str]]:
    """The first two columns of each line that is not empty."""
    rows = {number: line.strip().split("\t") for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    for number, columns in rows.items():
        if len(columns) < 2:
            raise LmgymError(
                f"key 'rewards.vader.lexicon': line {number} of {path} has no tab; it must be word, tab, rating"
            )
    return [(columns[0], columns[1]) for columns in rows.values()]


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise LmgymError(f"key 'rewards.vader.lexicon': cannot read {path}: {error}") from error
