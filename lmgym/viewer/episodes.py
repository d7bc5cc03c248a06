"""One answer with all that is known of its tokens, from a shard of traces or from a record of rollouts.jsonl, and why
each moved: the terms of its loss, how hard each pushes it, and what the algorithm says that it computes."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from lmgym.logs.traces.trace import TraceEpisode, TraceRow, TraceStep, TraceTurn, row_of_turns
from lmgym.pictures.ids import is_piece, picture_of
from lmgym.text.tokens import token_texts
from lmgym.types import PICTURE, Turn
from lmgym.viewer.pictures import shown_pictures

TRACED = [field.name for field in fields(TraceTurn)]
TURN = ("prompt_ids", "action_ids", "logprobs", "reward", "source_ids", "token_rewards", "versions")
NOT_RECORDED = (
    "This run was recorded by an earlier lmgym, which kept the terms of a loss but not how they push a token."
)


def episode_of_record(record: Mapping[str, Any]) -> TraceEpisode:
    """A record of rollouts.jsonl in the form of a trace. Its columns are the sampler's log-probabilities, and the
    rewards of single tokens if there are any: nothing else was kept there.

    Example: episode_of_record(record).rows[0].columns["logprobs_sampler"] -> array([-0.1, -0.02], dtype=float32)"""
    turns = list(record.get("turns", []))
    starts = [number for number, turn in enumerate(turns) if number == 0 or turn.get("restart")]
    ends = [*starts[1:], len(turns)]
    known = [Turn(**{name: turn[name] for name in TURN if turn.get(name) is not None}) for turn in turns]
    rows = [row_of_turns(known[begin:end], begin) for begin, end in zip(starts, ends, strict=False)]
    for row in rows:  # of someone else's making
        row.columns = {name: column for name, column in row.columns.items() if len(column) == len(row.actions)}
    prompt = record.get("prompt", "")
    return TraceEpisode(
        index=int(record["index"]),
        group=int(record["group"]),
        example={"id": record.get("example", ""), "prompt": prompt, "references": record.get("references", [])},
        messages=[],
        score=record.get("score"),
        reward_components=record.get("reward_components", {}),
        baseline=None,
        terminated=not any(turn.get("stop") in ("length", "context") for turn in turns),
        error=record.get("error", ""),
        version=record.get("version", 0),
        selected=True,
        turns=[TraceTurn(**{name: turn[name] for name in TRACED if name in turn}) for turn in turns],
        rows=rows,
    )


def turn_texts(episode: TraceEpisode) -> list[str]:
    """What the model said, one text a turn, with the beginning that it was given."""
    return [turn.given + turn.text for turn in episode.turns]


def mean_advantage(episode: TraceEpisode) -> float | None:
    """The mean advantage over an answer's actions; None if it was not in the batch."""
    known = [row.columns["advantages"] for row in episode.rows if "advantages" in row.columns]
    values = np.concatenate(known) if known else np.array([])
    return float(values.mean(dtype=float)) if len(values) else None


def row_tree(row: TraceRow, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """A token sequence as JSON can hold it: `pieces` are the texts of the tokens, which joined give the whole text,
    `special` the places of control tokens, and `pictures` those of the run folder, by place. Without a tokenizer a
    token's text is its id.

    Example: row_tree(row, tokenizer, folder)["pieces"] -> ["2", "+", "2", "=", "4", "<eos>"]"""
    ids = row.tokens.tolist()
    tree = {"ids": ids, **_texts(ids, tokenizer), "actions": row.actions.tolist(), "turn": row.turn.tolist()}
    tree["columns"] = {name: shortest(column) for name, column in row.columns.items()}
    if pictures := shown_pictures(folder, ids):
        tree["pictures"] = pictures
    if row.source is not None:
        tree["source"] = _texts(row.source.tolist(), tokenizer)
    return tree


def shortest(column: np.ndarray) -> list[float | None]:
    """float32 numbers with as many digits as it takes to tell them apart; None for NaN and infinity.

    Example:
        >>> shortest(np.array([0.1, np.nan], np.float32))
        [0.1, None]
    """
    numbers = [float(str(value)) for value in np.asarray(column, np.float32)]
    return [number if math.isfinite(number) else None for number in numbers]


def explanation(trace: TraceStep, episode: TraceEpisode) -> dict[str, Any]:
    """How the algorithm made a loss of this answer, as JSON.

    `terms`: the names of the terms, which have columns loss/NAME, weight/NAME and push/NAME, or some of them. `rows`:
    of each row the `push` of all terms together, positive for upwards. `formulas`: what the algorithm says that it
    computes, by name. `scores`: the numbers of which an advantage can be made.

    Example: explanation(trace, episode)["formulas"]["A"] -> "R less the mean of the group's scores (...)."
    """
    names = dict.fromkeys(name for row in episode.rows for name in row.columns)
    terms = dict.fromkeys(name.split("/", 1)[1] for name in names if name.startswith(("loss/", "push/")))
    pushes = [[row.columns[f"push/{term}"] for term in terms if f"push/{term}" in row.columns] for row in episode.rows]
    return {
        "terms": list(terms),
        "rows": [{"push": shortest(np.stack(own).sum(0))} if own else {} for own in pushes],
        "formulas": {name: str(text) for name, text in trace.formulas.items()},
        "scores": _scores(trace, episode),
        "note": NOT_RECORDED if terms and not any(pushes) and not trace.formulas else "",
    }


def _scores(trace: TraceStep, episode: TraceEpisode) -> dict[str, float | None]:
    """The score of an answer, and those of the others that trained in its step."""
    columns = trace.episodes
    rows = zip(columns["group"], columns["score"], columns["selected"], columns["index"], strict=True)
    trained = [(group, score, index) for group, score, selected, index in rows if selected and score is not None]
    group = [score for number, score, _ in trained if number == episode.group]
    others = [score for number, score, index in trained if number == episode.group and index != episode.index]
    step = [score for _, score, _ in trained]
    return {
        "R, the score of this answer": episode.score,
        "mean score of its group": fmean(group) if group else None,
        "standard deviation of the group's scores": stdev(group) if len(group) > 1 else None,
        "mean score of the other answers of its group": fmean(others) if others else None,
        "mean score of the step": fmean(step) if step else None,
        "standard deviation of all scores of the step": stdev(step) if len(step) > 1 else None,
        "score of the greedy answer to the same prompt": episode.baseline,
    }


def _texts(ids: list[int], tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {"pieces": [_name(id) for id in ids], "special": []}
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return {"pieces": token_texts(tokenizer, ids), "special": [place for place, id in enumerate(ids) if id in special]}


def _name(id: int) -> str:
    """A token without a tokenizer."""
    return f"[{id}]" if not is_piece(id) else "" if picture_of(id)[1] else PICTURE
