"""TRL: `(prompts, completions, **columns) -> list of numbers`, called once for all answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lmgym.core.errors import LmgymError, describe, place
from lmgym.processes.coroutines import result_of
from lmgym.rewards.failures import RewardFailed
from lmgym.rewards.foreign.signature import EpisodeReward, Foreign, note, prompt_of, written_of
from lmgym.types import Episode, Example

TRL = ("prompts", "completions", "completion_ids")  # arguments that are no columns; no column may have these names
ASKED = ("log_extra", "log_metric", "environments")  # given only to a function that names them


def from_trl(function: Callable[..., Any], name: str = "") -> EpisodeReward:
    """Turn a reward function written for TRL, `(prompts, completions, **columns) -> list of numbers`, into an lmgym
    reward of episodes.

    The function is called with keywords, as TRL's trainers do. `prompts` and `completions` are texts, or lists of
    messages if the prompt is a chat, by the data or the environment; of several turns all messages behind the prompt,
    as TRL gives them.
    `completion_ids` are the sampled ids of the last turn. Each key of the examples' `meta` is a column (None if an
    example lacks it), and `references` is one too; the recipe's arguments replace columns. A function without
    **columns gets only the arguments that it names. It may be a coroutine function. It may return None instead of a
    number: it cannot judge the answer.

    A function that names `log_extra` or `log_metric`, as a parameter or in its code, may call it; what it logs becomes
    NAME/COLUMN in the records. One that names `environments` gets, for each answer, an object with what the environment
    has noted (`Step.info`).

    Raises LmgymError for a function that takes neither prompts nor completions, for one that needs `trainer_state`,
    and, when it is called, for a column with the name of an argument. The attribute `check` of the result raises it for
    a parameter that no example has a column for. The attribute `other_kind` calls the function with texts in place of
    messages, or messages in place of texts.

    Source: TRL 1.16, GRPOTrainer._calculate_rewards.

    Example:
        >>> def mentions(completions, answer, **columns):
        ...     return [float(right in text) for right, text in zip(answer, completions)]
        >>> from_trl(mentions)(episodes)
        [1.0, 0.0]
    """
    foreign = Foreign(function, name or getattr(function, "__name__", "reward"), "TRL", (*TRL, *ASKED, "references"))
    called, takes = foreign.called, foreign.named
    if not foreign.everything and not {*takes} & {*TRL, "environments"}:
        raise LmgymError(
            f"reward '{called}' takes {', '.join(sorted(takes)) or 'nothing'}; one of style trl is called with "
            "prompts, completions and the columns of the examples, as keywords"
        )
    needed = foreign.needed()
    spelled = {*takes, *getattr(getattr(function, "__code__", None), "co_consts", ())}  # or columns["log_metric"]

    def call(episodes: list[Episode], arguments: Mapping[str, Any], other: bool) -> list[float]:
        columns = {**_columns(episodes, called, needed), **arguments}
        asked = {key: value for key, value in _asked(episodes, called).items() if key in spelled}
        try:
            found = result_of(function(**foreign.chosen({**columns, **asked, **_answers(episodes, other)})))
            return found  # type: ignore[no-any-return]  # base.call_guarded checks it
        except (LookupError, TypeError, AttributeError) as error:
            if hint := hint_of(error, columns, episodes):
                where = place(error, __file__)
                raise RewardFailed(f"reward '{called}' raised {describe(error)}{where}; {hint}") from error
            raise

    def reward(episodes: list[Episode], **arguments: Any) -> list[float]:
        return call(episodes, arguments, False)

    finished = foreign.finished(reward, needed, taken_columns)
    finished.other_kind = lambda episodes, **arguments: call(episodes, arguments, True)
    return finished  # type: ignore[no-any-return]


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


def _answers(episodes: Sequence[Episode], other: bool) -> dict[str, Any]:
    """TRL's arguments that are no columns; `other`: texts in place of messages, and messages in place of texts."""
    found: dict[str, list[Any]] = {key: [] for key in TRL}
    for episode in episodes:
        prompt, written = prompt_of(episode.example), written_of(episode)
        chat = is_chat(episode) != other
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not chat and not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        ids = list(episode.turns[-1].action_ids) if episode.turns else []
        for key, value in zip(TRL, (prompt, written if chat else episode.text, ids), strict=True):
            found[key].append(value)
    return found


def is_chat(episode: Episode) -> bool:
    """True if TRL would give the answer as messages."""
    return episode.chat or not isinstance(episode.example.prompt, str) or len(written_of(episode)) > 1


def _asked(episodes: Sequence[Episode], called: str) -> dict[str, Any]:
    """What TRL gives and only a function that names it gets."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        for episode, value in zip(episodes, values, strict=True):
            note(episode, f"{called}/{column}", value)

    def log_metric(name: str, value: Any) -> None:
        for episode in episodes:
            note(episode, f"{called}/{name}", value)

    noted = [{key: value for turn in episode.turns for key, value in turn.info.items()} for episode in episodes]
    return {
        "log_extra": log_extra,
        "log_metric": log_metric,
        "environments": [SimpleNamespace(**notes) for notes in noted],
    }


def hint_of(error: Exception, columns: Mapping[str, Any], episodes: Sequence[Episode]) -> str:
    """What in lmgym's recipe may have caused an error of a function written for TRL; empty if nothing is known."""
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(missing, str) and missing not in columns and missing not in TRL:
        return f"the examples have no column '{missing}'{taken_columns(episode.example for episode in episodes)}"
    if "SimpleNamespace" in str(error):
        return "`environments` hold what the environment notes in Step.info, by the names that it gives it there"
    if not isinstance(error, LookupError) and any(map(is_chat, episodes)):
        return (
            "completions are lists of messages here, and no texts, as in TRL's chats: the prompts are messages, by the "
            "data, the environment, task.prompts, task.system_prompt or task.few_shot; read completion[0]['content']"
        )
    if isinstance(error, TypeError) and "string ind" in str(error):
        return (
            "completions are texts here, and no lists of messages, since the prompts are texts; task.prompts: chat "
            "makes messages of them"
        )
    return ""


def taken_columns(examples: Iterable[Example]) -> str:
    """Which columns of a file are none for a reward, if the examples have references, which a column became."""
    if not any(example.references for example in examples):
        return ""
    return (
        "; they have references, and the column that became them (task.references) is called so here: take "
        "'references', a list of texts for each answer"
    )
