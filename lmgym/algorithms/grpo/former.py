"""GRPO's keys from before it was made of parts, and the parts that say the same.

    {objective: cispo, clip_high: 4.0}   ->   {surrogate: {name: cispo, high: 4.0}}

Recipes, sweeps and run folders with the former keys are read through `in_parts`, with a warning that names the new
form; `in_former_keys` is the way back, for what holds beside them. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError, warn

Tree = dict[str, Any]

RATIO_AND_BOUNDS = {"ratio": "ratio", "low": "clip_low", "high": "clip_high"}
ROWS = {"mismatch_bound": "mismatch_bound", "off_policy_threshold": "off_policy_threshold"}
BOUNDED = {"cap": "importance_cap", "floor": "importance_floor", "level": "importance_level"} | ROWS
MIXED = {"scale_by_mixed": "scale_by_mixed"}
TURNS = {"coefficient": "turn_coefficient", "gamma": "turn_gamma", "history": "turn_history",
         "history_power": "turn_history_power", "episode_coefficient": "episode_coefficient"}  # fmt: skip

FIELDS: Mapping[str, Mapping[str, Mapping[str, str]]] = {  # by kind and part: a field and its former key
    "surrogate": {
        "clip": RATIO_AND_BOUNDS | {"dual": "dual_clip"},
        "cispo": RATIO_AND_BOUNDS,
        "sapo": {"ratio": "ratio", "positive": "sapo_positive", "negative": "sapo_negative"},
        "dppo": {"low": "clip_low", "high": "clip_high"},
        "ipo_mask": {"bound": "clip_high"},
        "gmpo": {"low": "clip_low", "high": "clip_high"},
        "vespo": {"power_positive": "vespo_power_positive", "rate_positive": "vespo_rate_positive",
                  "power_negative": "vespo_power_negative", "rate_negative": "vespo_rate_negative"},
        "ce_gppo": RATIO_AND_BOUNDS | {"keep_below": "keep_below", "keep_above": "keep_above"},
        "none": {"ratio": "ratio"},
        "truncated_weight": {"cap": "truncate"},
    },
    "credit": {
        "group": {"scale": "scale_rewards"} | MIXED,
        "mean_scaled": {},
        "length_weighted": MIXED,
        "token_baseline": MIXED,
        "pass_at_k": {"k": "pass_at"},
        "selected": {"keep": "keep", "keep_by": "keep_by", "scale": "scale_rewards"} | MIXED,
        "each_reward": {},
    },
    "correction": {"none": ROWS, "sampler": ROWS, "truncated": BOUNDED, "masked": BOUNDED},
    "tokens": {
        "all": {},
        "top_entropy": {"share": "top_entropy"},
        "clip_cov": {"share": "covariance_share", "low": "covariance_low", "high": "covariance_high"},
        "kl_cov": {"share": "covariance_share", "coefficient": "covariance_coefficient"},
    },
}  # fmt: skip
DEFAULTS: Tree = {  # of the former keys, by kind; the first of each kind chose the part
    "surrogate": {
        "objective": "clip", "truncate": None, "ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None,
        "sapo_positive": 1.0, "sapo_negative": 1.05, "keep_below": 0.75, "keep_above": 1.0,
        "vespo_power_positive": 2.0, "vespo_rate_positive": 3.0, "vespo_power_negative": 3.0,
        "vespo_rate_negative": 2.0,
    },
    "credit": {
        "normalise_parts": False, "pass_at": None, "scale_rewards": "none", "baseline": "mean", "keep": None,
        "turn_coefficient": 0.0, "keep_by": "length", "scale_by_mixed": False, "turn_gamma": 0.95, "turn_history": 0,
        "turn_history_power": 1.0, "episode_coefficient": 1.0,
    },
    "correction": {
        "ratio_to": "old", "importance_cap": None, "importance_floor": None, "importance_outside": "truncate",
        "importance_level": "token", "mismatch_bound": None, "off_policy_threshold": None,
    },
    "tokens": {
        "covariance": "none", "top_entropy": 1.0, "covariance_share": 2e-4, "covariance_low": 1.0,
        "covariance_high": 5.0, "covariance_coefficient": 1.0,
    },
}  # fmt: skip
CREDIT_SWITCHES: Mapping[str, Tree] = {  # by part: the former key that chose it, where no field of it did
    "mean_scaled": {"scale_rewards": "mean"},
    "each_reward": {"normalise_parts": True},
    "length_weighted": {"baseline": "length"},
    "token_baseline": {"baseline": "token"},
}
KIND_OF = {key: kind for kind, keys in DEFAULTS.items() for key in keys}


def in_parts(given: Mapping[str, Any], owner: Any, preset: Mapping[str, Any], where: str) -> Tree:
    """The keys of an algorithm's section, the former ones as parts. `preset` is the preset's row, which goes over the
    defaults of the class `owner`; `where` is the section, for messages.

    Raises LmgymError for a former key that nothing would read. A recipe that writes all of them out, as a run folder's
    does, is only warned of."""
    if isinstance(given.get("scale_rewards"), bool):
        raise LmgymError(
            f"{where}scale_rewards is {given['scale_rewards']}; write group for true, none for false, or batch"
        )
    old = {key: given[key] for key in given if key in KIND_OF}
    new = {key: value for key, value in given.items() if key not in KIND_OF and key != "length_norm"}
    if "length_norm" in given:
        new["reduction"] = _reduction(given, preset, where)
    if old:
        kinds = [kind for kind in DEFAULTS if any(KIND_OF[key] == kind for key in old)]
        # What holds without them, in former keys too; then the given ones go over it.
        start = {kind: _plain(preset.get(kind, getattr(owner, kind))) for kind in kinds}
        for kind in kinds:
            if kind in given:
                raise LmgymError(
                    f"'{where}{kind}' and '{where}{next(key for key in old if KIND_OF[key] == kind)}' say the same in "
                    f"two ways; remove the second, which is the former one"
                )
        told = {kind: {key: value for key, value in old.items() if KIND_OF[key] == kind} for kind in kinds}
        parts = {kind: _part(kind, in_former_keys({kind: start[kind]}) | told[kind]) for kind in kinds}
        _check_read(old, parts, where, complete=len(old) > len(KIND_OF) // 2)
        new |= parts
    if old or "length_norm" in given:
        shown = {key: _short(new[key]) for key in (*DEFAULTS, "reduction") if key in new and key not in given} | (
            {"reduction": new["reduction"]} if "length_norm" in given else {}
        )
        text = ", ".join(f"{key}: {value}" for key, value in shown.items())
        count = len(old) + ("length_norm" in given)
        first = next(key for key in given if key in KIND_OF or key == "length_norm")
        keys = f"'{where}{first}'" if count == 1 else f"'{where}{first}' and {count - 1} more"
        warn(f"{keys} became parts; today this is written {text}", FutureWarning, stacklevel=2)
    return new


def in_former_keys(section: Mapping[str, Any]) -> Tree:
    """A section with parts as the former keys, each with its value; a part of one's own has none."""
    flat = {key: value for key, value in section.items() if key not in DEFAULTS}
    for kind in DEFAULTS:
        if kind in section:
            tree = section[kind] if isinstance(section[kind], Mapping) else {"name": section[kind]}
            flat |= DEFAULTS[kind] | _former(kind, tree)
    if flat.get("reduction") == "limit":
        flat |= {"reduction": "constant", "length_norm": True}
    return flat


def _former(kind: str, part: Mapping[str, Any]) -> Tree:
    """The former keys of one part."""
    name = part.get("name")
    if name == "turns":
        episode = _former(kind, part.get("episode", {"name": "group"}))
        return episode | {key: part[field] for field, key in TURNS.items() if field in part}
    fields = FIELDS[kind].get(str(name), {})
    flat = {key: part[field] for field, key in fields.items() if field in part}
    if kind == "surrogate":
        flat["objective"] = {"ipo_mask": "ipo", "truncated_weight": "clip"}.get(str(name), name)
    elif kind == "correction":
        flat |= {"ratio_to": "sampler"} if name == "sampler" else {}
        flat |= {"importance_outside": "mask"} if name == "masked" else {}
    elif kind == "tokens":
        flat |= {"covariance": {"clip_cov": "clip", "kl_cov": "penalise"}.get(str(name), "none")}
    else:
        flat |= CREDIT_SWITCHES.get(str(name), {})
    return flat


def _part(kind: str, flat: Tree) -> Tree:
    """The part that a kind's former keys, all written out, mean."""
    if kind == "credit" and flat["turn_coefficient"]:
        episode = _part(kind, flat | {"turn_coefficient": 0.0})
        return {"name": "turns", "episode": episode, "scale": flat["scale_rewards"]} | {
            f: flat[key] for f, key in TURNS.items()
        }
    name = _name(kind, flat)
    if name not in FIELDS[kind]:
        raise LmgymError(f"algorithm.objective is {name!r}; {registry.suggest(name, FIELDS[kind])}")
    return {"name": name} | {field: flat[key] for field, key in FIELDS[kind][name].items()}


def _name(kind: str, flat: Tree) -> str:
    if kind == "surrogate":
        objective = str(flat["objective"])
        return "truncated_weight" if flat["truncate"] is not None else {"ipo": "ipo_mask"}.get(objective, objective)
    if kind == "correction":
        bounded = flat["importance_cap"] is not None or flat["importance_floor"] is not None
        if flat["ratio_to"] == "sampler" or not bounded:
            return "sampler" if flat["ratio_to"] == "sampler" else "none"
        return "masked" if flat["importance_outside"] == "mask" else "truncated"
    if kind == "tokens":
        whole = "top_entropy" if flat["top_entropy"] != 1 else "all"
        return {"clip": "clip_cov", "penalise": "kl_cov"}.get(str(flat["covariance"]), whole)
    ways = {
        "each_reward": flat["normalise_parts"],
        "pass_at_k": flat["pass_at"] is not None,
        "mean_scaled": flat["scale_rewards"] == "mean",
        "length_weighted": flat["baseline"] == "length",
        "token_baseline": flat["baseline"] == "token",
        "selected": flat["keep"] is not None,
    }
    return next((name for name, chosen in ways.items() if chosen), "group")


def _check_read(old: Tree, parts: Mapping[str, Tree], where: str, complete: bool) -> None:
    """Raise LmgymError for a former key that no part reads; with all keys written out, only warn."""
    for key, value in old.items():
        kind = KIND_OF[key]
        back = DEFAULTS[kind] | _former(kind, parts[kind])
        if value in (DEFAULTS[kind][key], back.get(key)):
            continue
        sentence = f"'{where}{key}' is {value}, and nothing reads it beside {kind}: {parts[kind]['name']}"
        if not complete:
            raise LmgymError(f"{sentence}; remove it")
        warn(f"{sentence}; it had no effect", FutureWarning, stacklevel=4)


def _plain(part: Any) -> Tree:
    """A part as a tree with its name, parts inside of it too."""
    if isinstance(part, Mapping):
        return dict(part)
    tree: Tree = {"name": registry.name_of(part.kind, type(part))}
    for one in fields(part):
        value = getattr(part, one.name)
        tree[one.name] = _plain(value) if hasattr(value, "kind") else value
    return tree


def _reduction(given: Mapping[str, Any], preset: Mapping[str, Any], where: str) -> Any:
    """What `length_norm` and `reduction` mean together."""
    reduction = given.get("reduction", preset.get("reduction", "token"))
    reduction = "constant" if reduction == "limit" else reduction
    if given["length_norm"] and reduction != "constant":
        raise LmgymError(
            f"'{where}length_norm' goes with reduction: constant, and reduction is {reduction}; write reduction: limit "
            "for both, or remove it"
        )
    return "limit" if given["length_norm"] else reduction


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items() if item is not None) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
