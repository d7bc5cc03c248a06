"""Reward functions that were written for another library: recognised by their parameters, called as that library does.

    form            recognised by                                 called
    lmgym           (texts, examples, ...)                        once for all answers, by position
    trl             completions, prompts, completion_ids, or      once for all answers, with lists as keywords
                    environments
    verl            solution_str; solution_strs                   with keywords, for each answer; once for all
    openrlhf        queries                                       once for all answers, with lists as keywords
    verifiers       completion or state; a Rubric                 once for each answer, with keywords
    reasoning_gym   answer and entry                              once for each answer, by position

A function of another form that the recipe's arguments fit may be a factory: what it returns is the reward. None of
these libraries is imported."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.rewards import foreign
from lmgym.rewards.foreign.openrlhf import from_openrlhf
from lmgym.rewards.foreign.reasoning_gym import from_reasoning_gym
from lmgym.rewards.foreign.signature import named, parameters
from lmgym.rewards.foreign.trl import TRL, from_trl
from lmgym.rewards.foreign.verifiers import from_verifiers, is_rubric
from lmgym.rewards.foreign.verl import from_verl

Style = Literal["lmgym", "trl", "verl", "verl_sequence", "openrlhf", "verifiers", "reasoning_gym"]
MARKS: dict[Style, set[str]] = {  # one of these parameters tells the form; the first that fits
    "verl": {"solution_str", "solution_strs"},
    "openrlhf": {"queries"},
    "trl": {*TRL, "environments"},
    "verifiers": {"completion", "state"},
}
MAKERS: dict[str, Callable[..., Any]] = {
    "trl": from_trl,
    "verl": from_verl,
    "verl_sequence": partial(from_verl, whole=True),  # only by the option `style`
    "openrlhf": from_openrlhf,
    "verifiers": from_verifiers,
    "reasoning_gym": from_reasoning_gym,
}
FILES = (__file__, *map(str, Path(foreign.__file__).parent.glob("*.py")))  # between a reward and its caller
FORMS = (
    "(texts, examples) as lmgym's, (completions, **columns) as TRL's, (data_source, solution_str, ground_truth) as "
    "verl's, (queries, prompts, labels) as OpenRLHF's, (completion, answer) as verifiers', (answer, entry) as "
    "reasoning-gym's, nor a function that makes one of its arguments"
)


def style_of(function: Any, name: str) -> Style:
    """The library that a reward function was written for, by the names of its parameters.

    Raises LmgymError if they fit no form, or if `function` cannot be called. `name` is the reward's, for the message.

    Example:
        >>> def mentions(completions, answer, **columns): ...
        >>> style_of(mentions, "mentions")
        'trl'
    """
    if getattr(function, "takes_episodes", False) or getattr(function, "pays_tokens", False):
        return "lmgym"
    if is_rubric(function):
        return "verifiers"
    takes = parameters(function, name)
    positional = [p.name.strip("_") for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional[:1] == ["texts"] or positional[1:2] == ["examples"]:
        return "lmgym"
    for style, marks in MARKS.items():
        if marks & {*named(takes)}:
            return style
    if {"answer", "entry"} <= {*named(takes)}:
        return "reasoning_gym"
    taken = ", ".join(str(parameter).partition(":")[0].partition("=")[0].strip() for parameter in takes)
    raise LmgymError(
        f"reward '{name}' takes ({taken}), which is no form of reward that lmgym knows: {FORMS}; rename its "
        "parameters, or say with the option 'style' which form it has"
    )


def made_by(factory: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """The reward function that a factory makes of the recipe's arguments, as `get_soft_overlong_punishment` of TRL
    does. Raises LmgymError, as `style_of` does, for a function that makes none.

    Example: made_by(get_soft_overlong_punishment, {"max_completion_len": 100, "soft_punish_cache": 20}, "overlong")"""
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError):
        style_of(factory, name)  # raises
    made = factory(**arguments)
    if not callable(made):
        style_of(factory, name)
    style_of(made, name)
    return made


def is_factory(function: Any, name: str) -> bool:
    """True for a function whose parameters fit no form of reward."""
    try:
        style_of(function, name)
    except LmgymError:
        return inspect.isroutine(function) or inspect.isclass(function)
    return False


def adapted(function: Any, style: Style, name: str = "") -> Any:
    """The function as lmgym calls it: unchanged, or a function of a list of episodes if it has another form.

    Example: adapted(mentions, "trl")(episodes) -> [1.0, 0.0]"""
    return function if style == "lmgym" else MAKERS[style](function, name)
