"""Reward functions that were written for another library: recognised by their parameters, called as that library does.

    form            recognised by                             called
    lmgym           (texts, examples, ...)                    once for all answers, by position
    trl             completions, prompts or completion_ids    once for all answers, with lists as keywords
    verifiers       completion or state; a Rubric             once for each answer, with keywords
    reasoning_gym   answer and entry                          once for each answer, by position

None of these libraries is imported.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from lmgym.core.errors import LmgymError, describe, place, warn
from lmgym.core.registry import suggest
from lmgym.processes.coroutines import result_of, results_of
from lmgym.rewards.reasoning_gym_entries import TAGGED, entry_of
from lmgym.types import Episode, Example

Style = Literal["lmgym", "trl", "verifiers", "reasoning_gym"]
EpisodeReward = Callable[[list[Episode]], list[float]]
TRL = ("prompts", "completions", "completion_ids")  # arguments that are no columns; no column may have these names
TRL_LOGS = ("log_extra", "log_metric")  # can be called, and record nothing
VERIFIERS = ("prompt", "completion", "answer", "state", "info", "task")
ELSEWHERE = {  # what only the other library's trainer has
    "trainer_state": "TRL's trainer",
    "environments": "TRL's trainer",
    "states": "a reward of whole groups",
    "infos": "a reward of whole groups",
    "trace": "verifiers' own rollout",
    "runtime": "verifiers' own rollout",
}
FORMS = (
    "(texts, examples) as lmgym's, (completions, **columns) as TRL's, (completion, answer) as verifiers', "
    "(answer, entry) as reasoning-gym's"
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
    if _is_rubric(function):
        return "verifiers"
    parameters = _parameters(function, name)
    positional = [p.name.strip("_") for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional[:1] == ["texts"] or positional[1:2] == ["examples"]:
        return "lmgym"
    named = set(_named(parameters))
    if named & {*TRL}:
        return "trl"
    if named & {"completion", "state"}:
        return "verifiers"
    if {"answer", "entry"} <= named:
        return "reasoning_gym"
    taken = ", ".join(str(parameter).partition(":")[0].partition("=")[0].strip() for parameter in parameters)
    raise LmgymError(
        f"reward '{name}' takes ({taken}), which is no form of reward that lmgym knows: {FORMS}; rename its "
        "parameters, or say with the option 'style' which form it has"
    )


def adapted(function: Any, style: Style, name: str = "") -> Any:
    """The function as lmgym calls it: unchanged, or a function of a list of episodes if it has another form.

    Example:
        >>> adapted(mentions, "trl")(episodes)
        [1.0, 0.0]
    """
    if style == "trl":
        return from_trl(function, name)
    if style == "verifiers":
        return from_verifiers(function, name)
    if style == "reasoning_gym":
        return from_reasoning_gym(function, name)
    return function


def from_trl(function: Callable[..., Any], name: str = "") -> EpisodeReward:
    """Turn a reward function written for TRL, `(prompts, completions, **columns) -> list of numbers`, into an lmgym
    reward of episodes.

    The function is called with keywords, as TRL's trainers do. `prompts` and `completions` are texts, or lists of
    messages if the example's prompt is a chat. `completion_ids` are the sampled ids. Each key of the examples' `meta`
    is a column (None if an example lacks it), and `references` is one too. If an episode has several turns, the last
    one is the completion. A function without **columns gets only the arguments that it names. It may be a coroutine
    function. It may return None instead of a number: the reward does not apply. That counts as 0, as in TRL's score
    (TRL's metric leaves such answers out). `log_extra` and `log_metric` record nothing, with a warning.

    Raises LmgymError for a function that takes neither prompts nor completions, for one that needs `trainer_state` or
    `environments`, and, when it is called, for a column with the name of an argument. The attribute `check` of the
    result raises it for a parameter that no example has a column for.

    Source: TRL 1.16, GRPOTrainer._calculate_rewards.

    Example:
        >>> def mentions(completions, answer, **columns):
        ...     return [float(right in text) for right, text in zip(answer, completions)]
        >>> from_trl(mentions)(episodes)
        [1.0, 0.0]
    """
    called = name or getattr(function, "__name__", "reward")
    parameters = _parameters(function, called)
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = _named(parameters)
    if not everything and not {*named} & {*TRL}:
        taken = ", ".join(sorted(named)) or "nothing"
        raise LmgymError(
            f"reward '{called}' takes {taken}; one of style trl is called with prompts, completions and the columns of "
            "the examples, as keywords"
        )
    own = (*TRL, *TRL_LOGS, "references")
    needed = _needed(parameters, own, called)
    logs = {log: _unrecorded(called, log) for log in TRL_LOGS}

    def reward(episodes: list[Episode]) -> list[float]:
        columns = _columns(episodes, called, needed)
        given = {**columns, **logs, **_answers(episodes)}
        try:
            values = result_of(function(**{key: value for key, value in given.items() if everything or key in named}))
        except (LookupError, TypeError, AttributeError) as error:
            if hint := _hint(error, columns, episodes):
                where = place(error, __file__)
                raise LmgymError(f"reward '{called}' raised {describe(error)}{where}; {hint}") from error
            raise
        if isinstance(values, Sequence) and not isinstance(values, str):
            return [0.0 if value is None else value for value in values]
        return values  # base.call_guarded accepts an array, and refuses anything else with a clear message

    return _finished(reward, called, "TRL", needed)


def from_verifiers(function: Any, name: str = "") -> EpisodeReward:
    """Turn a reward function written for verifiers, or a Rubric of weighted functions, into an lmgym reward of
    episodes. A Rubric's value is the weighted sum of its functions.

    A function, or coroutine function, is called once for each answer, with the keywords that it names: `prompt` and
    `completion` (lists of messages), `answer` (`meta`'s, else the first reference, else ""), `info` (`meta`'s, else
    all of `meta`), `task` (`meta`'s, else ""), `state` (a dictionary of these, with example_id, is_completed and
    is_truncated), the other keys of `meta`, and the objects of its Rubric (`parser` ...). With several turns the last
    one is the completion.

    Raises LmgymError for a function of whole groups, and for one that needs what only verifiers' rollouts have. An
    exception in the function ends the run; in verifiers it counts as 0. The attribute `check` of the result raises
    LmgymError for a parameter that no example has a key of `meta` for.

    Source: verifiers 0.1.14, Rubric.score_objects and Rubric._call_individual_reward_func. (Later versions have tasks
    with methods in place of functions.)

    Example:
        >>> async def correct(completion, answer):
        ...     return float(answer in completion[-1]["content"])
        >>> from_verifiers(correct)(episodes)
        [1.0, 0.0]
    """
    called = name or getattr(function, "__name__", "reward")
    rubric = _is_rubric(function)
    functions, weights = (function.funcs, function.weights) if rubric else ([function], [1.0])
    objects = dict(getattr(function, "class_objects", {})) if rubric else {}
    if not functions or len(functions) != len(weights):
        raise LmgymError(f"reward '{called}' is a Rubric of {len(functions)} functions and {len(weights)} weights")
    signatures = [_parameters(one, called) for one in functions]
    needed = dict.fromkeys(key for own in signatures for key in _needed(own, (*VERIFIERS, *objects), called))

    def values_of(index: int, given: Sequence[Mapping[str, Any]]) -> list[Any]:
        everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signatures[index])
        named = _named(signatures[index])
        shown = [{key: value for key, value in one.items() if everything or key in named} for one in given]
        return results_of([functions[index](**one) for one in shown])

    def reward(episodes: list[Episode]) -> list[float]:
        given = [{**dict.fromkeys(needed), **_state(episode, objects)} for episode in episodes]
        columns = [values_of(index, given) for index in range(len(functions))]
        if not rubric:
            return columns[0]
        rows = zip(*columns, strict=True)
        return [sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in rows]

    return _finished(reward, called, "verifiers", needed)


def from_reasoning_gym(function: Callable[..., Any], name: str = "") -> EpisodeReward:
    """Turn a function written as reasoning-gym's `score_answer(answer, entry) -> number` into an lmgym reward of
    episodes.

    `answer` is the content of the last <answer>...</answer>; without such tags the whole text. `entry` is the library's
    record of the puzzle (`meta["entry"]`); of another task it is {"question", "answer", "metadata"}, made of prompt,
    first reference and `meta`.

    Raises LmgymError for the library's own methods: some of them let Python evaluate the answer.

    Source: reasoning-gym 0.1.25, ProceduralDataset.score_answer.

    Example:
        >>> from_reasoning_gym(lambda answer, entry: float(answer == entry["answer"]))(episodes)
        [1.0, 0.0]
    """
    called = name or getattr(function, "__name__", "reward")
    home = type(getattr(function, "__self__", None)).__module__
    if home.split(".")[0] == "reasoning_gym":
        raise LmgymError(
            f"reward '{called}' is a method of reasoning-gym, and some of these evaluate the model's text as Python; "
            "take the reward 'reasoning_gym', which scores by them and evaluates arithmetic only"
        )

    def reward(episodes: list[Episode]) -> list[float]:
        answers = [(TAGGED.findall(episode.text) or [episode.text])[-1].strip() for episode in episodes]
        entries = [entry_of(episode.example) for episode in episodes]
        return results_of([function(answer, entry) for answer, entry in zip(answers, entries, strict=True)])

    reward.__name__ = called
    return reward


# What the functions are given


def _columns(episodes: Sequence[Episode], called: str, needed: Iterable[str]) -> dict[str, Any]:
    """The examples' `meta` as lists, one for each key, and for each needed parameter."""
    metas = [episode.example.meta for episode in episodes]
    keys = dict.fromkeys(key for meta in metas for key in meta)
    for key in TRL:
        if key in keys:
            raise LmgymError(f"reward '{called}' of style trl: the examples have a column '{key}'; call it otherwise")
    columns: dict[str, Any] = {key: [meta.get(key) for meta in metas] for key in [*keys, *needed]}
    columns.setdefault("references", [list(episode.example.references) for episode in episodes])
    return columns


def _hint(error: Exception, columns: Mapping[str, Any], episodes: Sequence[Episode]) -> str:
    """What in lmgym's recipe may have caused an error of a function written for TRL; empty if nothing is known."""
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(missing, str) and missing not in columns and missing not in TRL:
        return f"the examples have no column '{missing}'{_taken(episode.example for episode in episodes)}"
    if not isinstance(error, LookupError) and any(not isinstance(one.example.prompt, str) for one in episodes):
        return (
            "completions are lists of one message here, and no texts, as in TRL's chats: the prompts are messages, by "
            "the data, task.system_prompt or task.few_shot; read completion[0]['content']"
        )
    if isinstance(error, TypeError) and "string ind" in str(error):
        return "completions are texts here, and no lists of messages, since the prompts are texts"
    return ""


def _taken(examples: Iterable[Example]) -> str:
    """Which columns of a file are none for a reward, if the examples have references, which a column became."""
    if not any(example.references for example in examples):
        return ""
    return (
        "; they have references, and the column that became them (task.references) is called so here: take "
        "'references', a list of texts for each answer"
    )


def _answers(episodes: Sequence[Episode]) -> dict[str, Any]:
    """TRL's arguments that are no columns. A chat's completion is a list of one message."""
    return {
        "prompts": [_prompt(episode.example) for episode in episodes],
        "completions": [
            episode.text if isinstance(episode.example.prompt, str) else _messages(episode) for episode in episodes
        ],
        "completion_ids": [list(episode.turns[-1].action_ids) if episode.turns else [] for episode in episodes],
    }


def _state(episode: Episode, objects: Mapping[str, Any]) -> dict[str, Any]:
    """All keyword arguments that verifiers would pass for one answer."""
    example = episode.example
    meta, prompt = dict(example.meta), _prompt(example)
    own = {
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "completion": _messages(episode),
        "answer": meta.get("answer", example.references[0] if example.references else ""),
        "info": meta.get("info", meta),
        "task": meta.get("task", ""),
    }
    state = {**own, "example_id": example.id, "is_completed": True, "is_truncated": episode.truncated}
    return {**meta, **own, "state": state, **objects}


def _prompt(example: Example) -> str | list[Mapping[str, str]]:
    return example.prompt if isinstance(example.prompt, str) else [dict(message) for message in example.prompt]


def _messages(episode: Episode) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": episode.text}]


def _unrecorded(called: str, log: str) -> Callable[..., None]:
    """Stands in for TRL's `log_extra` or `log_metric`."""

    def ignore(*arguments: Any, **keywords: Any) -> None:
        warn(
            f"reward '{called}' calls {log}, which records nothing here; make a reward of weight 0 of what it logs",
            stacklevel=2,
        )

    return ignore


# Their signatures


def _is_rubric(thing: Any) -> bool:
    """True for verifiers' Rubric: functions and their weights."""
    lists = [getattr(thing, attribute, None) for attribute in ("funcs", "weights")]
    return not inspect.isroutine(thing) and all(isinstance(one, list) for one in lists)


def _parameters(function: Any, called: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise LmgymError(f"reward '{called}' is {type(function).__name__}, and not a function with parameters") from (
            error
        )


def _named(parameters: Sequence[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _needed(parameters: Sequence[inspect.Parameter], own: Iterable[str], called: str) -> list[str]:
    """The parameters that only a column of the examples can fill. Raises LmgymError for what lmgym cannot give."""
    needed = [p.name for p in parameters if p.name in _named(parameters) and p.default is p.empty]
    for key in needed:
        if key in ELSEWHERE and key not in own:
            raise LmgymError(
                f"reward '{called}' needs '{key}', which only {ELSEWHERE[key]} has; give the parameter a default, or "
                "remove it"
            )
    return [key for key in needed if key not in own]


def _finished(reward: EpisodeReward, called: str, library: str, needed: Iterable[str]) -> EpisodeReward:
    """The reward with its name, and with a check that the examples have what it needs (see base.check_examples)."""

    def check(examples: Sequence[Example]) -> None:
        columns = {key for example in examples for key in example.meta}
        taken = _taken(examples) if library == "TRL" else ""
        for key in needed:
            if examples and key not in columns:
                raise LmgymError(
                    f"reward '{called}', written for {library}, needs '{key}' of each example, and no example has it "
                    f"in its meta; {suggest(key, columns)}{taken}"
                )

    reward.__name__ = called
    reward.check = check  # type: ignore[attr-defined]
    return reward
