"""Expands a recipe with lists of values, or with seeds, into one recipe for each combination. Trees in, trees out.

There are two notations, which may be mixed: in the `runs:` section of a recipe, lists under dotted keys, and seeds; or
anywhere in the tree `{expand: true, values: [...]}` instead of a value. Source of the second: RL4LMs,
core_components/sweep.py."""

import copy
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from lmgym.config.yaml import check_heard, is_unheard, own_key, set_key
from lmgym.core.errors import LmgymError

SEED = "seed"


@dataclass(frozen=True)
class Variant:
    """One of the combinations: its label (short, a valid folder name, computed from its values), its values by dotted
    key, and its tree.

    Example: Variant("learning_rate-0.0001,seed-1", {"optimizer.learning_rate": 1e-4, "seed": 1}, {...})"""

    label: str
    settings: dict[str, Any] = field(hash=False)
    tree: dict[str, Any] = field(hash=False)


def expand(
    tree: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    stage_keys: Collection[str] = (),
) -> list[Variant]:
    """All combinations of the values; the seed varies fastest, then the last key. Without values, the tree itself.

    `sweep` has a list of values under each dotted key (or under nested keys); `seeds` are values of the key "seed".
    `stage_keys` are the keys that may be written without the name of the only stage, as in `key=value` overrides. The
    values of `expand` may be sections that contain `expand` again; then each of their combinations is a value. Raises
    LmgymError for an empty list or something else than a list, a repeated value or key, a key inside of another one,
    and a key that the tree lacks.

    Example: two seeds for each of two numbers of steps
        >>> tree = {"steps": {"expand": True, "values": [20, 40]}}
        >>> [variant.label for variant in expand(tree, seeds=[0, 1])]
        ['steps-20,seed-0', 'steps-20,seed-1', 'steps-40,seed-0', 'steps-40,seed-1']
    """
    axes = {key: _values(values, f"runs.sweep: {key}") for key, values in flat(sweep or {})}
    if seeds:
        _once(SEED, axes)
        axes[SEED] = list(seeds)
    # Combine the values written in the tree with those of `sweep` and the seeds.
    variants = []
    for inline, base in _alternatives(tree, ""):
        for key in axes:
            _once(key, inline)
        _check_apart({key: [value] for key, value in inline.items()} | axes, base)
        for key in inline:
            if is_unheard(base, key, stage_keys):
                raise LmgymError(f"runs: every stage sets {key} itself, so the values at the top change nothing")
        for values in product(*axes.values()):
            settings = dict(zip(axes, values, strict=True))
            variant = copy.deepcopy(base)
            for key, value in settings.items():
                _set(variant, key, copy.deepcopy(value), stage_keys)
            variants.append(({**inline, **settings}, variant))
    # Label the variants, by names as short as possible.
    names = short_names([key for key in variants[0][0] if key != SEED])
    labelled = {}
    for settings, variant in variants:
        name = label(settings, names)
        if name in labelled:
            raise LmgymError(f"runs: {name} comes twice; give each value once")
        labelled[name] = Variant(name, settings, variant)
    return list(labelled.values())


def says_expand(value: Any) -> bool:
    """True for the notation {expand: true, values: [...]}."""
    return isinstance(value, Mapping) and value.get("expand") is True and "values" in value


def expands(tree: Any) -> bool:
    """True if any value in the tree has the notation of `says_expand`."""
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return says_expand(tree) or any(expands(value) for value in inner)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each dotted key, as many as are needed to distinguish the keys.

    Example:
        >>> short_names(["optimizer.learning_rate", "stages.warm.steps", "stages.rl.steps"])
        {'optimizer.learning_rate': 'learning_rate', 'stages.warm.steps': 'warm.steps', 'stages.rl.steps': 'rl.steps'}
    """
    names = {}
    for key in keys:
        words = key.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        names[key] = next(
            (end for end in ends if not any(f".{other}".endswith(f".{end}") for other in keys if other != key)), key
        )
    return names


def label(settings: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The name of a run: name-value for each setting, the seed last.

    Example:
        >>> label({"seed": 0, "optimizer.learning_rate": 1e-5}, {"optimizer.learning_rate": "learning_rate"})
        'learning_rate-1e-05,seed-0'
    """
    ordered = [key for key in settings if key != SEED] + [SEED] * (SEED in settings)
    return ",".join(f"{_file_name(names.get(key, key))}-{text_of(settings[key])}" for key in ordered)


def text_of(value: Any) -> str:
    """A value as a short text for a folder name; a long value, a list or a section ends in a hash of it.

    Example:
        >>> text_of(0.0001), text_of(True), text_of(None), text_of("1e-5")
        ('0.0001', 'true', 'null', '1e-05')
        >>> text_of({"name": "reinforce", "baseline": "none"})
        'reinforce-baseline-none-ec2fdf'
    """
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d+", value):
        value = float(value)  # YAML reads 1e-5 as text
    if isinstance(value, str):
        short, exact = _file_name(value.rsplit("/", 1)[-1]), value
    elif isinstance(value, (dict, list)):
        short, exact = _file_name(_words(value)) if isinstance(value, dict) else "", None
    else:
        short = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
        exact = short
    if short and short == exact and len(short) <= 24:
        return short
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:6]
    return f"{short[:24]}-{digest}".lstrip("-")


def _words(section: Mapping[str, Any]) -> str:
    """The name of a section, then its other keys and values."""
    rest = [f"-{key}-{value}" for key, value in section.items() if key != "name"]
    return f"{section.get('name', '')}{''.join(rest)}".lstrip("-")


def _alternatives(node: Any, path: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each combination of the `expand` values below a node: the chosen values by dotted key, and the resulting node."""
    if says_expand(node):
        # A chosen value may contain further choices.
        for value in _values(node, path):
            for _, chosen in _alternatives(value, path):
                yield {path: chosen}, chosen
    elif isinstance(node, Mapping):
        parts = [list(_alternatives(value, f"{path}.{key}".lstrip("."))) for key, value in node.items()]
        for choice in product(*parts):
            settings = {key: value for chosen, _ in choice for key, value in chosen.items()}
            yield settings, dict(zip(node, (value for _, value in choice), strict=True))
    # Elements of lists (stages) are named by their `name`, as in overrides.
    elif isinstance(node, list):
        named = [value.get("name", index) if isinstance(value, Mapping) else index for index, value in enumerate(node)]
        parts = [list(_alternatives(value, f"{path}.{name}")) for name, value in zip(named, node, strict=True)]
        for choice in product(*parts):
            settings = {key: value for chosen, _ in choice for key, value in chosen.items()}
            yield settings, [value for _, value in choice]
    else:
        yield {}, node


def flat(sweep: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The lists of a sweep by dotted key, whether the keys are dotted or nested."""
    for key, values in sweep.items():
        where = f"{path}.{key}".lstrip(".")
        if isinstance(values, Mapping) and not says_expand(values):
            yield from flat(values, where)
        else:
            yield where, values


def _values(given: Any, where: str) -> list[Any]:
    values = given["values"] if says_expand(given) else given
    surplus = sorted(set(given) - {"expand", "values"}) if says_expand(given) else []
    if surplus:
        raise LmgymError(f"{where}: a section that says expand holds 'expand' and 'values' only, not '{surplus[0]}'")
    if not isinstance(values, list) or not values:
        raise LmgymError(f"{where}: the values must be a list of at least one, not {values!r}")
    return values


def holds(outer: str, inner: str) -> bool:
    """True if `outer` is the key `inner` itself, or a section that contains it.

    Example: holds("algorithm", "algorithm.group_size") -> True"""
    return f"{inner}.".startswith(f"{outer}.")


def _check_apart(values: Mapping[str, Sequence[Any]], tree: Mapping[str, Any]) -> None:
    """Raise LmgymError for two keys that set the same value: the later one would undo the other. Those of `values` have
    the order in which they are set."""
    for earlier, later in combinations(values, 2):
        one, other = own_key(tree, earlier), own_key(tree, later)
        undone, outer = holds(other, one), later
        if not undone and holds(one, other):  # a section, then a key of it that some of the sections have already
            inner = other.removeprefix(f"{one}.")
            sections = [flat(value) for value in values[earlier] if isinstance(value, Mapping)]
            undone, outer = any(holds(key, inner) or holds(inner, key) for own in sections for key, _ in own), earlier
        if undone:
            raise LmgymError(
                f"runs: {earlier} and {later} both have values, and set the same thing; write all of it as values of "
                f"{outer}"
            )


def _once(key: str, others: Collection[str]) -> None:
    if key in others:
        raise LmgymError(f"runs: the values of {key} are given in two places; keep one")


def _set(tree: dict[str, Any], key: str, value: Any, stage_keys: Collection[str]) -> None:
    try:
        set_key(tree, key, value, stage_keys)
        check_heard(tree, [key], stage_keys)
    except LmgymError as error:
        raise LmgymError(f"runs.sweep: {str(error).removeprefix('override ')}") from None


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)
