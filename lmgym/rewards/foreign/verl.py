"""verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, for one answer or a whole batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.processes.coroutines import result_of, results_of
from lmgym.rewards.foreign.signature import EpisodeReward, Foreign, note, parameters
from lmgym.types import Episode, Example

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # of verl's reward manager `batch`


def from_verl(function: Callable[..., Any], name: str = "", whole: bool = False) -> EpisodeReward:
    """Turn a score function written for verl into an lmgym reward of episodes.

    It is called once for each answer, or, if it takes `solution_strs`, once for all, with the keywords that it names.
    `solution_str` is the answer without special tokens; of several turns all that stands behind the first prompt; if
    `whole`, prompt and answer with special tokens, as in verl 0.1 (TinyZero, Logic-RL).
    `data_source`, `extra_info` and `reward_model["ground_truth"]` are columns as in verl's files; without the last one
    `ground_truth` is the column of that name, else the first reference. What the data lack is the parameter's own
    default, else None; but `extra_info` is a dictionary in any case, to which verl adds `num_turns`, the messages of
    the conversation, and `rollout_reward_scores`, here empty. It returns a number, a list that begins with it, or a
    dictionary: its `score` counts, and its other entries are recorded as NAME/KEY. The recipe's arguments are verl's
    `reward_kwargs`.

    Source: verl 0.7, NaiveRewardManager and BatchRewardManager.

    Example:
        >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        ...     return {"score": float(ground_truth in solution_str), "length": len(solution_str)}
        >>> from_verl(compute_score)(episodes)
        [1.0, 0.0]
    """
    called = name or getattr(function, "__name__", "reward")
    batch = "solution_strs" in Foreign(function, called, "verl", ()).named
    foreign = Foreign(function, called, "verl", BATCH if batch else ONE)
    needed = foreign.needed()
    everything = replace(foreign, own=()).needed()
    source = ["data_source"] if "data_source" in everything else []  # a column of verl's own name
    defaults = {p.name for p in parameters(function, called) if p.default is not p.empty}
    unknown = dict.fromkeys(key for key in ONE if key not in defaults)  # what such a parameter gets without a column

    def call(episodes: list[Episode], arguments: Mapping[str, Any], whole: bool) -> list[float]:
        rows = [{**unknown, **_row(episode, whole), **arguments} for episode in episodes]
        for row, episode in zip(rows, episodes, strict=True):
            row |= {key: episode.example.meta.get(key) for key in needed if key not in arguments}
        if batch:
            columns = {
                many: [row.get(one) for row in rows]
                for one, many in zip(ONE, BATCH, strict=True)
                if many not in defaults or any(row.get(one) is not None for row in rows)
            }
            results = list(result_of(function(**foreign.chosen({**columns, **arguments}))))
        else:
            results = results_of([function(**foreign.chosen(row)) for row in rows])
        return [_score(result, episode, called) for result, episode in zip(results, episodes, strict=True)]

    def reward(episodes: list[Episode], **arguments: Any) -> list[float]:
        return call(episodes, arguments, whole)

    finished = foreign.finished(reward, [*source, *needed])
    finished.reads_sequence = "tokens" if whole else "text"
    if not whole:
        finished.other_kind = lambda episodes, **arguments: call(episodes, arguments, True)
    return finished  # type: ignore[no-any-return]


def _row(episode: Episode, whole: bool) -> dict[str, Any]:
    """What verl gives of an answer, without what the data lack."""
    meta, written = episode.example.meta, episode.text
    if whole or len(episode.turns) > 1:  # the two texts of views.as_sequence
        written = "".join(message["content"] for message in episode.messages[0 if whole else -1 :])
    values = (meta.get("data_source"), written, ground_truth_of(episode.example), _extra_info(episode))
    return {key: value for key, value in zip(ONE, values, strict=True) if value is not None}


def _extra_info(episode: Episode) -> Any:
    """The column, as verl's manager fills it in: question and answer are two turns, a call and its result two more."""
    given = episode.example.meta.get("extra_info")
    if given is not None and not isinstance(given, Mapping):
        return given
    answers = 1 + sum(turn.continuation is None for turn in episode.turns[:-1])  # a message may take several turns
    return {**(given or {}), "num_turns": 2 * answers, "rollout_reward_scores": {}}


def ground_truth_of(example: Example) -> Any:
    """The right answer, where verl's files have it, else the first reference.

    Example: ground_truth_of(Example("a/0", "2+2=", meta={"reward_model": {"ground_truth": "4"}})) -> "4"
    """
    model = example.meta.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return example.meta.get("ground_truth", example.references[0] if example.references else None)


def _score(result: Any, episode: Episode, called: str) -> Any:
    if isinstance(result, Mapping):
        for key, value in result.items():
            if key != "score":
                note(episode, f"{called}/{key}", value)
        if "score" not in result:
            raise LmgymError(f"reward '{called}', of verl's form, returned a dictionary without 'score': {[*result]}")
        return result["score"]
    return result[0] if isinstance(result, Sequence) and not isinstance(result, str) and result else result
