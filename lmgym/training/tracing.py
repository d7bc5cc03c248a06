"""What a step leaves in traces/: a table of its answers, and of some of them every number that there is.

Of a token it has what the update computes anyway, which is shown to the step's `StepTrace`, and the derivative of each
term by its log-probability (updates/pushes.py). What was not computed is absent."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmgym.batch import Batch
from lmgym.config.build import plain
from lmgym.core import seeds
from lmgym.core.errors import represent
from lmgym.distributed.ranks import Ranks
from lmgym.logs.records import sampled_tokens
from lmgym.logs.traces.texts import texts_of
from lmgym.logs.traces.trace import (
    Numbers,
    TraceEpisode,
    TraceRow,
    TraceStep,
    TraceTurn,
    packed,
    row_of_turns,
    unpacked,
)
from lmgym.training.stage import StageRun
from lmgym.types import Episode, Example

PREPARED = ("advantages", "returns", "values", "logprobs_old", "logprobs_ref", "logprobs_teacher")  # columns of a batch

RowPlace = tuple[int, int]  # index of an episode, and the row's number in it


@dataclass
class StepTrace:
    """One step's trace while it is made, and the watcher of its update: each row that is kept is shown once, when an
    optimizer step computes it first.

    Example:
        >>> trace = begin_trace(stage, episodes, batch, step)
        >>> metrics = update(stage.algorithm, run.policy, batch, stage.optimizer, trace)
        >>> write_trace(stage, episodes, batch, trace)
    """

    step: int
    kept: set[int]
    """The episodes that are kept whole, by index."""
    surprise: dict[int, float]
    """Mean |advantage| over the actions of each episode of the batch."""
    rows: dict[int, RowPlace]
    """The rows of the batch that are kept, by `Batch.row`."""
    shown: list[tuple[list[int], list[str], Tensor]] = field(default_factory=list)
    """Rows, names of columns, and their numbers [columns, rows, T], where the policy is."""
    left: set[int] = field(default_factory=set)
    """Rows that have not been shown yet."""

    def wants(self, rows: Tensor) -> bool:
        """Whether one of these rows is kept and has not been shown yet."""
        return bool(self.left) and not self.left.isdisjoint(rows.tolist())

    def show(self, rows: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Keep the numbers of these rows' tokens, as fp32."""
        numbers = rows.tolist()
        places = [place for place, number in enumerate(numbers) if number in self.left]
        chosen = torch.tensor(places, device=next(iter(columns.values())).device)
        block = torch.stack([column[chosen].to(torch.float32) for column in columns.values()])
        self.shown.append(([numbers[place] for place in places], list(columns), block))
        self.left.difference_update(numbers)


def begin_trace(stage: StageRun, episodes: Sequence[Episode], batch: Batch, step: int) -> StepTrace | None:
    """Choose what is kept of a step, before its update; None if the recipe keeps nothing (logs.traces: none). `batch`
    is the prepared batch of the selected episodes."""
    what = stage.run.config.logs.traces
    if what == "none":
        return None
    surprise = mean_surprise(batch)
    kept = {episode.index for episode in episodes}
    if what == "some":
        groups = kept_groups(episodes, surprise, seeds.key(*stage.path, "traces", step))
        kept = {episode.index for episode in episodes if episode.group in groups}
    # An episode's rows are in the batch in their order.
    rows: dict[int, RowPlace] = {}
    counts: dict[int, int] = {}
    for number, index in zip(batch.require("row").tolist(), batch.episode.tolist(), strict=True):
        if index in kept:
            rows[number] = (index, counts.get(index, 0))
            counts[index] = counts.get(index, 0) + 1
    return StepTrace(step, kept, surprise, rows, left=set(rows))


def mean_surprise(batch: Batch) -> dict[int, float]:
    """Mean |advantage| over the actions of each episode of a batch."""
    if batch.advantages is None:
        return {}
    episode, number = np.unique(batch.episode.cpu().numpy(), return_inverse=True)
    total = np.bincount(number, (batch.advantages.abs() * batch.actions).sum(1).double().cpu().numpy())
    tokens = np.bincount(number, batch.actions.sum(1).cpu().numpy())
    return dict(zip(episode.tolist(), (total / np.maximum(tokens, 1)).tolist(), strict=True))


def kept_groups(episodes: Sequence[Episode], surprise: Mapping[int, float], key: int) -> set[int]:
    """The first group (that of rollouts.jsonl), the one with the largest mean surprise, and one of the others, which
    `key` chooses.

    Example: of four groups of one answer with surprises 0.1, 0.2, 0.9 and 0.3: groups 0, 2, and either 1 or 3"""
    of_group: dict[int, list[float]] = {}
    for episode in episodes:
        of_group.setdefault(episode.group, []).append(surprise.get(episode.index, 0.0))
    groups = list(of_group)
    kept = {groups[0], max(groups, key=lambda group: sum(of_group[group]) / len(of_group[group]))}
    others = [group for group in groups if group not in kept]
    return kept | ({others[key % len(others)]} if others else set())


def write_trace(stage: StageRun, episodes: Sequence[Episode], batch: Batch, trace: StepTrace) -> None:
    """Write a step's trace, after its update. The first rank writes; all take part, since each has computed rows of its
    own. Raises LmgymError if it cannot be written."""
    kept = [episode for episode in episodes if episode.index in trace.kept]
    rows: dict[RowPlace, TraceRow] = {}
    for one in kept:
        first = 0  # turn of the row
        for number, turns in enumerate(one.rows()):
            rows[one.index, number] = row_of_turns(turns, first)
            first += len(turns)
    trained = rows_of_batch(rows, trace, batch)
    computed = shown_columns(trace, trained, stage.run.ranks)
    if stage.run.traces is None:
        return
    add_columns(trained, batch, computed)
    tree = plain(stage.algorithm)
    step = TraceStep(
        stage=stage.index,
        stage_name=stage.config.name,
        step=trace.step,
        algorithm=tree.pop("name"),
        fields=_plain(tree),
        formulas=dict(stage.algorithm.formulas),
        pairs=stage.algorithm.compares_pairs,
        episodes=episode_table(episodes, trace),
    )
    found = {id(one.example): plain_example(one.example) for one in kept}
    whole = (whole_record(one, found[id(one.example)], rows) for one in kept)
    stage.run.traces.write(step, whole, texts_of(episodes, trace.kept))


def rows_of_batch(rows: Mapping[RowPlace, TraceRow], trace: StepTrace, batch: Batch) -> dict[int, TraceRow]:
    """Those of the kept rows that are in the batch, by `Batch.row`. One that a loop of one's own has changed is left
    out."""
    found, tokens, lengths = {}, batch.tokens.cpu().numpy(), batch.mask.sum(1).tolist()
    for position, number in enumerate(batch.require("row").tolist()):
        row = rows.get(trace.rows[number]) if number in trace.rows else None
        if row is not None and np.array_equal(tokens[position, : lengths[position]], row.tokens):
            found[number] = row
    return found


def shown_columns(trace: StepTrace, rows: Mapping[int, TraceRow], ranks: Ranks) -> dict[int, dict[str, Numbers]]:
    """What the update has shown of each row on any rank, by the row's number: a number per action."""
    own: dict[int, dict[str, Numbers]] = {}
    for numbers, names, block in trace.shown:
        values = block.cpu().numpy()
        for place, number in enumerate(numbers):
            if number in rows:
                own[number] = dict(zip(names, values[:, place, rows[number].actions], strict=True))
    if ranks.size == 1:
        return own
    trees = {number: {name: packed(column) for name, column in columns.items()} for number, columns in own.items()}
    found = {}
    for part in ranks.gather(json.dumps(trees).encode()):
        for number, columns in json.loads(part).items():
            found[int(number)] = {name: unpacked(column) for name, column in columns.items()}
    return found


def add_columns(rows: Mapping[int, TraceRow], batch: Batch, computed: Mapping[int, Mapping[str, Numbers]]) -> None:
    """Add the batch's columns to its rows, then what the update has computed of them."""
    positions = {number: position for position, number in enumerate(batch.require("row").tolist())}
    chosen = torch.tensor([positions[number] for number in rows], dtype=torch.long)
    for name in PREPARED:
        column = getattr(batch, name)
        if column is not None:
            values = column[chosen.to(column.device)].to(torch.float32).cpu().numpy()
            for row, own in zip(rows.values(), values, strict=True):
                row.columns[name] = own[row.actions]
    for number, columns in computed.items():  # whitened by minibatch, advantages are no longer those of `prepare`
        rows[number].columns.update(columns)


def episode_table(episodes: Sequence[Episode], trace: StepTrace) -> dict[str, Any]:
    """The columns of step.json, in the order of the episodes' index."""
    episodes = sorted(episodes, key=lambda episode: episode.index)
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    names = dict.fromkeys(name for episode in episodes for name in episode.reward_components)
    return {
        "index": [one.index for one in episodes],
        "group": [one.group for one in episodes],
        "example": [one.example.id for one in episodes],
        "score": [one.score if one.judged else None for one in episodes],
        "reward_components": {name: [one.reward_components.get(name) for one in episodes] for name in names},
        "length": [sampled_tokens([one]) for one in episodes],
        "turns": [len(one.turns) for one in episodes],
        "truncated": [one.truncated for one in episodes],
        "selected": [one.selected for one in episodes],
        "reason": [reason_left_out(one, groups[one.group]) for one in episodes],
        "error": [one.error for one in episodes],
        "version": [one.version for one in episodes],
        "surprise": [trace.surprise.get(one.index) for one in episodes],
        "kept": [one.index in trace.kept for one in episodes],
    }


def reason_left_out(episode: Episode, group: Iterable[Episode]) -> str:
    """Why an episode was not selected, in a few words; empty if it was."""
    if episode.selected:
        return ""
    if episode.error:
        return "its environment failed"
    if not episode.judged:
        return ": ".join(["no reward judged it", *list(episode.reward_errors.values())[:1]])
    group = list(group)
    if any(other.selected for other in group):
        return "others of its group were chosen"
    equal = len({other.score for other in group if other.judged}) == 1 and len(group) > 1
    return "its group was not chosen: all scores are equal" if equal else "its group was not chosen"


def whole_record(episode: Episode, example: dict[str, Any], rows: Mapping[RowPlace, TraceRow]) -> TraceEpisode:
    """An episode with its rows."""
    own = {
        "example": example,
        "messages": _plain(episode.messages),
        "turns": [TraceTurn(**_same_fields(TraceTurn, turn)) for turn in episode.turns],
        "rows": [rows[episode.index, number] for number in range(len(episode.rows()))],
    }
    score = episode.score if episode.judged else None
    return TraceEpisode(**{**_same_fields(TraceEpisode, episode), **own, "score": score})


def _same_fields(kind: Any, thing: Any) -> dict[str, Any]:
    """What a dataclass of another kind has under the same names."""
    return {one.name: getattr(thing, one.name) for one in fields(kind) if hasattr(thing, one.name)}


def plain_example(example: Example) -> dict[str, Any]:
    """An example as JSON can hold it; of a value of `meta` that JSON cannot hold, its `repr`."""
    prompt = example.prompt if isinstance(example.prompt, str) else list(example.prompt)
    tree = {"id": example.id, "prompt": prompt, "references": example.references, "meta": example.meta}
    return {name: _plain(value) for name, value in tree.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value if value is None or isinstance(value, str | bool | int | float) else represent(value)
