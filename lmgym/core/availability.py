"""What built-in names need besides lmgym itself, and whether this machine has it. Nothing is imported to find out.

`Entry.needs` is a list of the names in `NEEDS`, parted by ", "; a test holds the one against the other.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

Runs = Literal["yes", "given", "no"]


@dataclass(frozen=True)
class Need:
    """Something that may be missing: `here` looks for it; `remedy` is how to get it, in the words of a command line.

    Where a recipe has to name it, or may name something in its place, `given` says by which argument.

    Example: Need(partial(shutil.which, "java"), "install a Java runtime")
    """

    here: Callable[[], object]
    remedy: str = ""
    given: Callable[[], str] | None = None


@dataclass(frozen=True)
class Availability:
    """Whether a name can be used on this machine now: "yes", "given" (with the arguments in `how`) or "no" (until what
    `how` says has been done).

    Example: Availability("no", "pip install 'lmgym[metrics]'")
    """

    runs: Runs
    how: str = ""


def availability_of(needs: str) -> Availability:
    """How things stand with the needs of a name, as `Entry.needs` lists them. An unknown one (a plug-in's) is taken for
    an argument: nothing is known of it.

    Example:
        >>> availability_of("a model")
        Availability(runs='given', how='model=')
    """
    missing, given = [], []
    for name in filter(None, needs.split(", ")):
        need = NEEDS.get(name, _argument(name))
        if need.here():
            continue
        if need.given is not None:
            given.append(need.given())
        else:
            missing.append(need.remedy)
    if missing:
        return Availability("no", "; ".join(dict.fromkeys(missing)))
    return Availability("given", ", ".join(given)) if given else Availability("yes")


def nltk_folders() -> list[Path]:
    """Where NLTK looks for its data, without importing it."""
    own = [Path(folder) for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]
    own += [Path.home() / "nltk_data"]
    own += [Path(sys.prefix) / place for place in ("nltk_data", "share/nltk_data", "lib/nltk_data")]
    own += [Path(place) / "nltk_data" for place in ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")]
    return own


def _nltk_data(name: str) -> bool:
    """Whether NLTK would find this, such as corpora/wordnet, as a folder or a file, or packed."""
    return any((folder / f"{name}{end}").exists() for folder in nltk_folders() for end in ("", ".zip"))


@cache
def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _extra(name: str, *packages: str) -> Need:
    return Need(partial(_installed, *packages), f"pip install 'lmgym[{name}]'")


def _argument(words: str) -> Need:
    """Something that only the recipe can name."""
    return Need(lambda: False, given=lambda: words)


def _path_or_hub() -> str:
    """What is on the Hub, and whether it can be reached, is not known without asking it."""
    return "path=, or from the Hub" if _installed("datasets") else "path=; for the Hub: pip install 'lmgym[data]'"


NEEDS: dict[str, Need] = {
    "path= or lmgym[data]": Need(lambda: False, given=_path_or_hub),
    "path=": _argument("path="),
    "lmgym[maths]": _extra("maths", "math_verify"),
    "lmgym[reasoning]": _extra("reasoning", "reasoning_gym"),
    "lmgym[metrics]": _extra("metrics", "sacrebleu", "nltk"),
    "lmgym[textarena]": _extra("textarena", "textarena"),
    "textworld": Need(partial(_installed, "textworld"), "pip install textworld"),
    "game=": _argument("game="),
    "WordNet for NLTK": Need(partial(_nltk_data, "corpora/wordnet"), "python -m nltk.downloader wordnet"),
    "vaderSentiment or lexicon=": Need(
        lambda: _installed("vaderSentiment") or _nltk_data("sentiment/vader_lexicon"),
        given=lambda: "lexicon=, or pip install vaderSentiment",
    ),
    "a model": _argument("model="),
    "a model and a head": _argument("model=, head="),
    "an endpoint": _argument("base_url=, model="),
    "a preference": _argument("preference="),
    "Java": Need(partial(shutil.which, "java"), "install a Java runtime"),
    "SPICE's jar": _argument("jar="),
    "Linux": Need(lambda: sys.platform == "linux", "Linux"),
}
