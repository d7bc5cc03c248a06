"""Rewards and metrics from a recipe's sections: the options of each, the function behind its name, where it runs."""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial, update_wrapper
from typing import Any

from lmgym.core import registry
from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError, warn
from lmgym.core.importable import importable_name
from lmgym.core.validation import check_arguments, converted, parameters_of
from lmgym.rewards.adapters import Style, adapted, is_factory, made_by, style_of
from lmgym.rewards.base import CorrectIsOne, Normalise, Reward, episodes
from lmgym.rewards.running.parallel import Parallel, in_parallel
from lmgym.rewards.running.pooled import Pooled, unlimited_reason
from lmgym.rewards.views import Stripping

OPTIONS = {
    "weight": float,
    "reward": str,
    "strip_thinking": Stripping,
    "post_process": str,
    "shaping": bool,
    "each_turn": bool,
    "normalise": Normalise,
    "parallel": dict[str, Any],
    "pool": bool,
    "tasks": list[str],
    "where": dict[str, Any],
    "style": Style,
    "correct_is_one": CorrectIsOne,
}
REPORTED = {  # what the record of an evaluation holds besides the rewards
    "kind", "stage", "stage_name", "step", "split", "count", "rewards_without_limit", "reward", "length/mean",
    "truncated", "truncated/context", "environment_errors", "broken", "unjudged", "reference_nll",
    "preference/accuracy", "preference/margin", "calibration/error", "step/accuracy", "step/first_wrong",
    "step/all_right",
}  # fmt: skip
REPORTED_PARTS = ("reward/", "unjudged/", "environment/")


def build_rewards(section: Mapping[str, Any]) -> list[Reward]:
    """Build the rewards of a recipe's section `rewards:`, in the order of its keys.

    A key is a registered name or "module:attribute". With the option `reward`, which then holds one of these, the key
    may be any name; so one function can be used twice. The value is the weight, or a mapping of `weight` (default 1),
    the options of any reward (OPTIONS) and the function's own arguments. A function that was written for another
    library is recognised by its parameters, and adapted (adapters.py); `style` names its form if they do not tell.

    Raises LmgymError for unknown names, for unknown, missing or wrong arguments, for a function of no known form, and
    for weights that are not finite.

    Example:
        >>> build_rewards({"final_answer": 1.0, "length": {"weight": 0.1, "target": 50}})
    """
    return [_built(name, value) for name, value in section.items()]


def _built(name: str, value: Any) -> Reward:
    key = f"rewards.{name}"
    if name.removesuffix("/low").removesuffix("/high") in REPORTED or name.startswith(REPORTED_PARTS):
        raise LmgymError(f"key '{key}': evaluations report something else as '{name}'; choose another name")
    # Separate the options of any reward from the function's own arguments.
    arguments = {"weight": 1.0, **value} if isinstance(value, Mapping) else {"weight": value}
    options = {
        option: converted(hint, arguments.pop(option), f"{key}.{option}")
        for option, hint in OPTIONS.items()
        if option in arguments
    }
    if not math.isfinite(options["weight"]):
        raise LmgymError(f"key '{key}.weight' must be finite, not {options['weight']}")
    # Find the function, adapt it if it is of another library's form, and check the arguments against its signature.
    target = options.pop("reward", name)
    original = function = registry.get("reward", target)
    style, sent = options.pop("style", None), arguments
    built_in = target in registry.BUILTIN["reward"]
    if factory := style is None and not built_in and is_factory(original, name):
        function, arguments = made_by(original, arguments, name), {}
    style = style or style_of(function, name)
    if built_in and style != "lmgym":
        raise LmgymError(f"key '{key}.style' is {style}, and '{target}' is a reward of lmgym's own; remove it")
    function = function if style == "lmgym" else episodes(adapted(function, style, name))
    of_episodes = getattr(function, "takes_episodes", False)
    if "correct_is_one" in options and "correct_is_one" in parameters_of(function, given=1)[0]:
        arguments["correct_is_one"] = options.pop("correct_is_one")  # judges of lines know better where it holds
    arguments = check_arguments(function, arguments, key, given=1 if of_episodes else 2, also=OPTIONS)
    # Decide where it runs, and bind the arguments; with `parallel`, calls go to several processes.
    wanted = options.pop("pool", True)
    if not ("parallel" in options or hasattr(original, "limits_itself") or hasattr(original, "linear_time")):
        sent = sent if factory else arguments
        reason = unlimited_reason(original, sent, target) if wanted else "the recipe says pool: false"
        options["unlimited"] = reason
        if not reason:
            options["pooled"] = Pooled(str(importable_name(original, target)), sent, style, of_episodes, factory)
    if "parallel" in options:
        how = Parallel(**check_arguments(Parallel, options.pop("parallel"), f"{key}.parallel", given=0))
        if of_episodes or getattr(function, "pays_tokens", False):
            raise LmgymError(f"key '{key}.parallel' is for rewards of texts, and this one takes whole episodes")
        function = in_parallel(function, arguments, how)
    elif arguments:
        function = update_wrapper(partial(function, **arguments), function)
    options["tasks"] = tuple(options.get("tasks", ()))
    if "post_process" in options:
        processor = options["post_process"]
        options["post_process"] = registry.get("post_processor", processor)
        if processor not in registry.BUILTIN["post_processor"]:
            options["unlimited"] = options.get("unlimited") or f"'{processor}' changes its text in this process"
    _check_tokens(function, options, key)
    return Reward(name, function=episodes(function) if of_episodes else function, **options)


def _check_tokens(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Raise LmgymError for options that exclude each other: a reward per token allows none of these six."""
    if getattr(function, "pays_tokens", False):
        for option in ("shaping", "each_turn", "normalise", "strip_thinking", "post_process", "correct_is_one"):
            if options.get(option):
                raise LmgymError(f"key '{key}.{option}': this reward pays token by token of itself; leave it out")
    if getattr(function, "compares", False):
        for option in ("shaping", "each_turn", "correct_is_one"):
            if options.get(option):
                raise LmgymError(f"key '{key}.{option}': this reward compares whole answers to a prompt; leave it out")
    if options.get("normalise") and (options.get("shaping") or options.get("each_turn")):
        raise LmgymError(f"key '{key}.normalise' is for a reward of whole answers; leave out shaping and each_turn")
    if options.get("shaping") and options.get("each_turn"):
        raise LmgymError(f"key '{key}': 'shaping' pays tokens and 'each_turn' turns; leave one of them out")


def available_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's metrics; a metric that cannot run on this machine is replaced by its substitute
    (`Entry.substitute`).

    The substitute is reported under its own name, with one warning. If the recipe names the substitute too, the
    recipe's arguments are kept. Rewards are never replaced: a run trains on the rewards that it names, or not at all.

    Example: available_metrics({"meteor": {}, "bleu": {}}) -> {'meteor_stem': {}, 'bleu': {}}  # without WordNet"""
    available = {_available(name): section for name, section in metrics.items()}
    return available | {name: section for name, section in metrics.items() if name in available}


@cache  # warn once per metric
def _available(name: str) -> str:
    entry = registry.BUILTIN["reward"].get(name)
    if entry is None or not entry.substitute or (available := availability_of(entry.needs)).runs != "no":
        return name
    summary = registry.BUILTIN["reward"][entry.substitute].summary
    warn(
        f"metric '{name}' cannot run here (it needs: {available.how}); it is reported as "
        f"'{entry.substitute}', {summary}",
        stacklevel=4,
    )
    return entry.substitute
