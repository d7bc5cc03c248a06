"""What happened in each step of a run, written down for reading: traces/ in its folder (docs/run_folder.md).

A step is a zip of JSON: step.json is a table of all its answers, episodes/000007.json the whole record of one,
texts.json the words of the others. Arrays in them are base64 of little-endian int32 or float32, of tokens with pictures
int64. Imports no torch."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lmgym.core.errors import LmgymError
from lmgym.logs.formatting import json_bytes
from lmgym.logs.traces.files import (
    EPISODES,
    STEP,
    TEXTS,
    TRACES,
    Place,
    open_shard,
    places_in,
    read_member,
    shard_name,
    zipped,
)
from lmgym.logs.traces.texts import TraceTexts
from lmgym.logs.writer import replace_file
from lmgym.pictures.ids import is_piece
from lmgym.types import Turn

FORMAT = 1
LITTLE = {"int32": "<i4", "float32": "<f4", "int64": "<i8"}  # by numpy's name of the type

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(kw_only=True)
class TraceStep:
    """The table of a step: a column for each thing that is known of every answer, in the order of their index.

    Columns are "index", "group", "example" (its id), "score", "reward_components" (by name), "length" (tokens),
    "turns", "truncated", "selected", "reason" (why it was not selected), "error", "version", "surprise" (mean
    |advantage| over its tokens, None if it was not in the batch) and "kept" (the step holds its `TraceEpisode`).

    Example: read_step(Path("runs/a"), stage=0, step=12).episodes["score"] -> [0.5, 1.0, ...]"""

    stage: int
    stage_name: str
    step: int
    algorithm: str
    """Its registered name."""
    fields: dict[str, Any]
    """Its hyperparameters."""
    episodes: dict[str, Any]
    formulas: dict[str, str] = field(default_factory=dict)
    """What it computes, as texts by the name of a term or a symbol; empty in runs of before 0.1.0."""
    pairs: bool = False
    """Whether the best and the worst answer of a group train against each other."""


@dataclass(kw_only=True)
class TraceTurn:
    """What one turn of an answer was, in words; `Turn` in types.py explains each field."""

    text: str
    given: str = ""
    continuation: str | None = None
    stop: str = "eos"
    reward: float = 0.0
    restart: bool = False
    min_new_tokens: int = 0


@dataclass(kw_only=True)
class TraceRow:
    """One sequence of tokens: `actions` [A] are the places in `tokens` [L] that were sampled, `turn` [A] is the number
    of each one's turn (its place in `TraceEpisode.turns`). Each of the `columns` has a number per action [A].

    Example: row.tokens[row.actions] are the sampled ids, row.columns["logprobs_sampler"] what the sampler said of them
    """

    tokens: Integers
    actions: Integers
    turn: Integers
    columns: dict[str, Numbers]
    source: Integers | None = None
    """An encoder's input [S]; `tokens` are then the decoder's."""


@dataclass(kw_only=True)
class TraceEpisode:
    """All that is known of one answer but its seconds (timings.py). `example` has id, prompt, references and meta;
    `messages` is the conversation, the words of the environment and of tools included.

    Example: read_episode(Path("runs/a"), stage=0, step=12, index=7).rows[0].columns["advantages"]"""

    index: int
    group: int
    example: dict[str, Any]
    messages: list[dict[str, Any]]
    score: float | None  # None: no reward judged it
    reward_components: dict[str, float | None]
    baseline: float | None
    terminated: bool
    error: str
    version: int
    selected: bool
    turns: list[TraceTurn]
    rows: list[TraceRow]


def write_shard(
    folder: Path, step: TraceStep, episodes: Iterable[TraceEpisode], texts: TraceTexts | None = None
) -> Path:
    """Write one step into the traces/ of a run folder, whole or not at all; returns the file. Raises LmgymError if it
    cannot be written. A step that is there already is replaced."""
    tree = {"format": FORMAT} | {f.name: getattr(step, f.name) for f in fields(step)}
    said = [(TEXTS, json_bytes(vars(texts)))] if texts is not None and texts.answers else []
    contents = [
        (STEP, json_bytes(tree)),
        *said,
        *((_member(one.index), json_bytes(_episode_tree(one))) for one in episodes),
    ]
    path, data = folder / TRACES / shard_name(step.stage, step.step), zipped(contents)
    replace_file(path, lambda file: file.write(data), durable=False)
    return path


def shards(folder: Path) -> list[Place]:
    """(stage, step) of each step that a run folder has a trace of, sorted; none is opened. Raises LmgymError if traces/
    cannot be read. Example: shards(Path("runs/a")) -> [(0, 0), (0, 1), ...]"""
    return places_in(folder / TRACES)


def read_step(folder: Path, stage: int, step: int) -> TraceStep:
    """The table of one step; no answer is read. Raises LmgymError if the step is not there, damaged, or was written by
    a newer lmgym."""
    with open_shard(folder, stage, step) as shard:
        tree = json.loads(read_member(shard, STEP))
        if tree["format"] != FORMAT:
            raise LmgymError(
                f"{folder / TRACES} has format {tree['format']} in stage {stage + 1}, step {step + 1}, and this lmgym "
                f"reads format {FORMAT}; update lmgym"
            )
        return _built(TraceStep, tree)


def read_episode(folder: Path, stage: int, step: int, index: int) -> TraceEpisode:
    """The whole record of one answer; `index` is its number in the step. Raises LmgymError as `read_step` does, and if
    the step holds the answer's row in the table only."""
    with open_shard(folder, stage, step) as shard:
        if _member(index) not in shard.namelist():
            raise LmgymError(
                f"{folder / TRACES} has no whole record of answer {index} in stage {stage + 1}, step {step + 1}; "
                "logs.traces and logs.traces_gib say what a run keeps"
            )
        tree = json.loads(read_member(shard, _member(index)))
        tree["turns"] = [_built(TraceTurn, turn) for turn in tree["turns"]]
        tree["rows"] = [_row(row) for row in tree["rows"]]
        return _built(TraceEpisode, tree)


def row_of_turns(turns: Sequence[Turn], first: int = 0) -> TraceRow:
    """The tokens of one row, whose turns are consecutive ones of an episode from number `first` on, with what the
    sampler and the rewards have said of its actions."""
    tokens, actions = list[int](), list[int]()
    for turn in turns:
        tokens += turn.prompt_ids
        actions += range(len(tokens), len(tokens) + len(turn.action_ids))
        tokens += turn.action_ids
    columns: dict[str, Numbers] = {}
    if all(turn.logprobs for turn in turns):
        columns["logprobs_sampler"] = np.array([one for turn in turns for one in turn.logprobs], np.float32)
    if any(turn.token_rewards is not None for turn in turns):
        columns["token_rewards"] = np.concatenate([_token_rewards(turn) for turn in turns])
    if any(turn.versions for turn in turns):
        parts = np.array([part for turn in turns for part in turn.versions])
        columns["version"] = np.repeat(parts[:, 0].astype(np.float32), parts[:, 1])
    counts = [len(turn.action_ids) for turn in turns]
    return TraceRow(
        tokens=_ids(tokens),
        actions=np.array(actions, np.int32),
        turn=np.repeat(np.arange(first, first + len(turns), dtype=np.int32), counts),
        columns=columns,
        source=_ids(turns[0].source_ids) if turns[0].source_ids else None,
    )


def _ids(ids: Sequence[int]) -> Integers:
    """Token ids; those of pictures take 64 bits."""
    return np.array(ids, np.int64) if any(map(is_piece, ids)) else np.array(ids, np.int32)


def _token_rewards(turn: Turn) -> Numbers:
    """What each action has earned; the rest of the turn's reward is on the last one (as in `collate`)."""
    rewards = np.zeros(len(turn.action_ids), dtype=np.float32)
    if len(rewards):
        rewards += np.array(turn.token_rewards or 0.0, dtype=np.float32)
        rewards[-1] += turn.reward - sum(turn.token_rewards or ())
    return rewards


def packed(array: npt.NDArray[Any]) -> dict[str, str]:
    """An array of int32, int64 or float32 as JSON can hold it.

    Example: packed(np.float32([1])) -> {"float32": "AACAPw=="}"""
    little = LITTLE[array.dtype.name]
    return {array.dtype.name: base64.b64encode(array.astype(little, copy=False).tobytes()).decode()}


def unpacked(tree: Mapping[str, str]) -> npt.NDArray[Any]:
    """The array that `packed` has written. Raises KeyError or ValueError for anything else."""
    ((name, text),) = tree.items()
    return np.frombuffer(base64.b64decode(text, validate=True), LITTLE[name]).astype(name)


def _member(index: int) -> str:
    return f"{EPISODES}{index:06d}.json"


def _episode_tree(episode: TraceEpisode) -> dict[str, Any]:
    rows = []
    for row in episode.rows:
        tree: dict[str, Any] = {name: packed(getattr(row, name)) for name in ("tokens", "actions", "turn")}
        tree["columns"] = {name: packed(column) for name, column in row.columns.items()}
        rows.append(tree if row.source is None else tree | {"source": packed(row.source)})
    return vars(episode) | {"turns": [vars(turn) for turn in episode.turns], "rows": rows}


def _row(tree: Mapping[str, Any]) -> TraceRow:
    columns = {name: unpacked(column) for name, column in tree["columns"].items()}
    source = unpacked(tree["source"]) if "source" in tree else None
    tokens, actions, turn = (unpacked(tree[name]) for name in ("tokens", "actions", "turn"))
    if any(len(column) != len(actions) for column in (turn, *columns.values())):
        raise ValueError("columns of several lengths")
    return TraceRow(tokens=tokens, actions=actions, turn=turn, columns=columns, source=source)


def _built(kind: type[T], tree: Mapping[str, Any]) -> T:
    """A dataclass of those values that are its fields."""
    return kind(**{f.name: tree[f.name] for f in fields(kind) if f.name in tree})  # type: ignore[arg-type]
