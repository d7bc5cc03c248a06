"""Was the value that a recipe was given heard, or accepted and then ignored?"""

import math
from collections.abc import Mapping
from typing import Any

import yaml

from lmgym.config.schema import STAGE_KEYS
from tests.torture.damage import at_path
from tests.torture.recipes import RecipeMutant


class Ignored(Exception):
    """The mutant was accepted, and a part of it has no effect."""


def check_heard(mutant: RecipeMutant, tree: Mapping[str, Any]) -> None:
    """Raise Ignored where the one value that was changed is nowhere in the resolved recipe `tree`."""
    whole, path = yaml.safe_load(mutant.content), mutant.changed or ()
    given, places = at_path(whole, path), [tree]
    if path[0] == "stages":
        places, path = [tree["stages"][path[1]]] if len(path) > 1 else [], path[2:]
    elif path[0] in STAGE_KEYS:
        if any(path[0] in stage for stage in whole.get("stages") or ()):
            return  # a default, which a stage may answer with a value of its own
        places = tree["stages"]
    if path and not any(_has(place, path, given) for place in places):
        raise Ignored(f"{'.'.join(map(str, mutant.changed or ()))} = {given!r:.60} of {mutant.what}")


def _has(tree: Any, path: tuple[Any, ...], given: Any) -> bool:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return False
    return _alike(tree, given)


def _alike(found: Any, given: Any) -> bool:
    """The value that was given, perhaps as another type, a section for its name, or with its defaults."""
    if found == given or str(found) == str(given) or given is None:
        return True
    if isinstance(found, dict):
        if isinstance(given, dict):
            return all(_alike(found.get(key), value) for key, value in given.items())
        return _alike(found.get("name"), given)
    if isinstance(found, list) and isinstance(given, list | tuple | set):
        return len(found) == len(given) and all(map(_alike, found, given))
    try:
        return float(found) == float(given) or math.isnan(float(found)) == math.isnan(float(given)) is True
    except (TypeError, ValueError, OverflowError):
        return False
