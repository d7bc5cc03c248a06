"""Convert RL4LMs' reward functions and metrics to lmgym's rewards; a metric is a reward of weight 0."""

from collections.abc import Mapping
from typing import Any

from lmgym.compat.rl4lms.classes import recipe_arguments
from lmgym.compat.rl4lms.registries import MetricRegistry
from lmgym.compat.rl4lms.reward_arguments import METRICS, REWARDS, Named
from lmgym.compat.rl4lms.schema import Conversion, Section, identified, is_added
from lmgym.core import registry
from lmgym.core.errors import LmgymError


def rewards(value: Any, conversion: Conversion) -> dict[str, Any]:
    """The `rewards:` section of {id: REWARD, args: {...}}, with a shaping_fn as a second reward of weight 1.

    Example: {"id": "meteor", "args": {"shaping_fn": "common_gen_repeat_penalty"}} ->
    {"meteor": {"weight": 1.0}, "common_gen_repeat_penalty": {"weight": 1.0}}"""
    name, arguments = identified(value, "reward_fn")
    if is_added("reward", name):
        found: Named = {name: recipe_arguments("reward", name, arguments.rest())}
    elif name not in REWARDS:
        known = {*REWARDS, *registry.names("reward")}
        raise LmgymError(f"reward_fn.id is '{name}'; {registry.suggest(name, known)}")
    else:
        shaping = arguments.take("shaping_fn", str)
        found = REWARDS[name](arguments, conversion)
        if shaping is not None:
            found |= rewards({"id": shaping}, conversion)
        arguments.leave_out(conversion)
    if not found:
        raise LmgymError(f"reward_fn.id '{name}' has no counterpart in lmgym, so there is nothing to train on")
    return {key: {"weight": 1.0, **arguments} for key, arguments in found.items()}


def metrics(values: list[Any], given: Mapping[str, Any], conversion: Conversion) -> tuple[dict[str, Any], bool]:
    """The `evaluation.metrics:` section of a list of {id: METRIC, args: {...}}, and whether the references' likelihood
    is asked for. A metric that `given`, the stage's rewards, reports with the same arguments is left out; with other
    arguments its name ends in "_metric"."""
    section: dict[str, Any] = {}
    likelihood = False
    for index, value in enumerate(values):
        key = f"train_evaluation.metrics.{index}"
        name, arguments = identified(value, key)
        if (own := MetricRegistry.name(name)) or is_added("reward", name):
            found: Named = {own or name: recipe_arguments("reward", own or name, arguments.rest())}
        elif name == "causal_perplexity":
            found, likelihood = {}, _perplexity(arguments, conversion)
        elif name not in METRICS:
            known = {*METRICS, "causal_perplexity", *registry.names("reward")}
            raise LmgymError(f"{key}.id is '{name}'; {registry.suggest(name, known)}")
        else:
            found = METRICS[name](arguments, conversion)
            arguments.leave_out(conversion)
        for reward, settings in found.items():
            _add(reward, {"weight": 0.0, **settings}, section, given, key, conversion)
    return section, likelihood


def _add(
    name: str, settings: dict[str, Any], section: dict[str, Any], given: Mapping[str, Any], key: str, to: Conversion
) -> None:
    for others in (given, section):
        if name in others and {**others[name], "weight": 0.0} == settings:
            return
        if name in others:
            settings = {"reward": name, **settings}
            name = f"{name}_metric"
    if name in section:
        to.warn(f"{key}: '{name}' is there already with other arguments; this one is not reported")
        return
    section[name] = settings


def _perplexity(arguments: Section, conversion: Conversion) -> bool:
    """Whether the policy's own likelihood of the references is asked for."""
    model_type = arguments.take("model_type", str, "causal")
    arguments.idle(conversion, "stride", "tokenizer_id", "use_text_from_meta_data")
    arguments.leave_out(conversion)
    if model_type != "causal":
        conversion.warn(f"{arguments.key}.model_type: only causal models have this metric, in RL4LMs too")
        return False
    return True
