"""Reward functions that were written for another library."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.types import Episode

OWN = ("prompts", "completions", "completion_ids")  # arguments that are no columns; no column may have these names


def from_trl(function: Callable[..., Any], name: str = "") -> Callable[[list[Episode]], list[float]]:
    """Turn a reward function written for TRL, `(prompts, completions, **columns) -> list of numbers`, into an lmgym
    reward of episodes.

    The function is called with keywords, as TRL's trainers do. `prompts` and `completions` are texts, or lists of
    messages if the example's prompt is a chat. `completion_ids` are the sampled ids. Each key of the examples' `meta`
    is a column (None if an example lacks it), and `references` is one too. If an episode has several turns, the last
    one is the completion. A function without **columns gets only the arguments that it names. It may return None
    instead of a number: the reward does not apply. That counts as 0, as in TRL's score (TRL's metric leaves such
    answers out). There is no trainer_state, and calls of `log_extra` and `log_metric` are ignored.

    Raises LmgymError for a coroutine function, for one that takes neither prompts nor completions, and, when it is
    called, for a column with the name of an argument.

    Source: TRL 1.16, GRPOTrainer's reward_funcs.

    Example:
        >>> def mentions(completions, answer, **columns):
        ...     return [float(right in text) for right, text in zip(answer, completions)]
        >>> from_trl(mentions)(episodes)
        [1.0, 0.0]
    """
    # Refuse what could only fail later, in the middle of a run.
    called = name or getattr(function, "__name__", "reward")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise LmgymError(f"reward '{called}' is a coroutine function; a reward of style trl must be an ordinary one")
    parameters = inspect.signature(function).parameters.values()
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not everything and not named & {*OWN}:
        taken = ", ".join(sorted(named)) or "nothing"
        raise LmgymError(
            f"reward '{called}' takes {taken}; one of style trl is called with prompts, completions and the columns of "
            "the examples, as keywords"
        )

    def reward(episodes: list[Episode]) -> list[float]:
        given = _arguments(episodes, called)
        values: Any = function(**{key: value for key, value in given.items() if everything or key in named})
        if isinstance(values, Sequence) and not isinstance(values, str):
            return [0.0 if value is None else value for value in values]
        return values  # base.call_guarded accepts an array, and refuses anything else with a clear message

    reward.__name__ = called
    return reward


def _arguments(episodes: Sequence[Episode], called: str) -> dict[str, Any]:
    """All keyword arguments that TRL would pass."""
    metas = [episode.example.meta for episode in episodes]
    columns: dict[str, Any] = {"log_extra": _ignore, "log_metric": _ignore}
    for key in dict.fromkeys(key for meta in metas for key in meta):
        if key in OWN:
            raise LmgymError(f"reward '{called}' of style trl: the examples have a column '{key}'; call it otherwise")
        columns[key] = [meta.get(key) for meta in metas]
    columns.setdefault("references", [list(episode.example.references) for episode in episodes])
    return {
        **columns,
        "prompts": [_prompt(episode) for episode in episodes],
        "completions": [_completion(episode) for episode in episodes],
        "completion_ids": [list(episode.turns[-1].action_ids) if episode.turns else [] for episode in episodes],
    }


def _prompt(episode: Episode) -> str | list[Mapping[str, str]]:
    prompt = episode.example.prompt
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _completion(episode: Episode) -> str | list[dict[str, str]]:
    if isinstance(episode.example.prompt, str):
        return episode.text
    return [{"role": "assistant", "content": episode.text}]


def _ignore(*arguments: Any) -> None:
    """Stands in for TRL's `log_extra` and `log_metric`."""
