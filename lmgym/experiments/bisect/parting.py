"""`lmgym bisect RUN OTHER`: the first step at which two runs part, and the first number of it that differs. Equal runs
are equal bit for bit, so any difference counts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.experiments.bisect.change import CLOCKS
from lmgym.logs.records import METRICS, Record, read_records
from lmgym.logs.traces.trace import TraceEpisode, read_episode, read_step, shards

ORDER = (  # how a step comes to be; what stands earlier explains what stands later
    ("the prompts", ("example", "group")),
    ("the sampled answers", ("length", "tokens", "turns", "truncated", "version", "answers", "environment_errors")),
    ("the log-probabilities of the sampler", ("logprobs_sampler", "entropy", "kept")),
    ("the rewards", ("reward_components", "score", "reward", "token_rewards", "unjudged", "zero_variance_groups")),
    ("which answers train", ("selected", "reason")),
    ("the values, or another model's log-probabilities", ("values", "value", "logprobs_ref", "logprobs_teacher", "kl")),
    ("the advantages", ("advantages", "returns", "surprise", "advantage")),
    ("the log-probabilities of the trainer", ("logprobs", "logprobs_old", "ratio", "sampler_logprob_gap")),
    ("the loss", ("loss", "weight", "push")),
    ("the gradient", ("gradient_norm", "rows", "updates")),
    ("the learning rate", ("learning_rate",)),
)  # fmt: skip
PLACES = {name: place for place, (_, names) in enumerate(ORDER) for name in names}
# Keys that change no training step.
RECIPE = ("out", "logs", "reward_watch", "checkpoint", "evaluation", "callbacks", "threads")


@dataclass(frozen=True)
class Parting:
    """Where two runs part: the `stage` and the `step` (from 0), the part of a step that differs first, and the number
    `name` in it as both have it, at `where`. `others` are the other parts of the step that differ too; `keys` are those
    of the recipes that differ; `equal_steps` were the same before. A `step` of None: they do not part."""

    stage: str
    step: int | None
    part: str
    name: str
    where: str
    values: tuple[Any, Any]
    others: list[str]
    keys: list[str]
    equal_steps: int


def find_parting(first: Path, second: Path) -> Parting:
    """Compare the steps of two runs in their order, up to the first that differs. Raises LmgymError if one of them has
    none, or is damaged.

    Example: find_parting(Path("runs/a"), Path("runs/b")).part -> "the rewards" """
    keys = list(_keys(read_yaml(first / "recipe.yaml"), read_yaml(second / "recipe.yaml")))
    steps = [_steps(folder) for folder in (first, second)]
    common = [place for place in steps[0] if place in steps[1]]
    if not common:
        raise LmgymError(f"{first} and {second} have no step in common")
    traced = set(shards(first)) & set(shards(second))
    for count, place in enumerate(common):
        folders = (first, second) if place in traced else ()
        found = sorted(_step_differences(folders, place, [own[place] for own in steps]), key=lambda one: one[0])
        if found:
            _, name, where, values = found[0]
            parts = dict.fromkeys(ORDER[one[0]][0] if one[0] < len(ORDER) else "other numbers" for one in found)
            part, *others = parts
            stage = str(steps[0][place].get("stage_name", place[0]))
            return Parting(stage, place[1], part, name, where, values, others, keys, count)
    stage = str(steps[0][common[-1]].get("stage_name", ""))
    return Parting(stage, None, "", "", "", (None, None), [], keys, len(common))


def _steps(folder: Path) -> dict[tuple[int, int], Record]:
    records = read_records(folder / METRICS)
    return {(one["stage"], one["step"]): one for one in records if one["kind"] == "train"}


Found = tuple[int, str, str, tuple[Any, Any]]  # place in ORDER, name, where, both values


def _step_differences(folders: Sequence[Path], place: tuple[int, int], records: Sequence[Record]) -> Iterator[Found]:
    """All that differs in a step: in metrics.jsonl, and in the tables and answers of traces/ in these folders."""
    if folders:
        try:
            yield from _traced(folders, place)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise LmgymError(f"step {place[1] + 1}: traces/ is not as lmgym writes it ({error})"[:300]) from error
    for name in {**records[0], **records[1]}:
        values = records[0].get(name), records[1].get(name)
        if name.split("/")[0] not in (*CLOCKS, "kind", "stage_name") and values[0] != values[1]:
            yield _rank(name), name, "", values


def _traced(folders: Sequence[Path], place: tuple[int, int]) -> Iterator[Found]:
    tables = [read_step(folder, *place).episodes for folder in folders]
    for name in (name for name in tables[0] if name in tables[1] and name not in ("kept", "index", "reason")):
        columns = [_column(table, name) for table in tables]
        if columns[0] != columns[1]:
            unlike = [at for at, (one, two) in enumerate(zip(*columns, strict=False)) if one != two]
            where = f"answer {unlike[0]}" if unlike else "another number of answers"
            at = unlike[0] if unlike else None
            yield _rank(name), name, where, tuple(len(c) if at is None else c[at] for c in columns)  # type: ignore[misc]
    kept = [{index for index, own in zip(table["index"], table["kept"], strict=True) if own} for table in tables]
    for index in sorted(kept[0] & kept[1]):
        one, other = (read_episode(folder, *place, index) for folder in folders)
        yield from _answer_differences(one, other, f"answer {index}")


def _column(table: Mapping[str, Any], name: str) -> list[Any]:
    """A column of a step's table; of the reward components a dictionary for each answer."""
    column = table[name]
    if not isinstance(column, Mapping):
        return list(column)
    return [dict(zip(column, own, strict=True)) for own in zip(*column.values(), strict=True)]


def _answer_differences(one: TraceEpisode, other: TraceEpisode, where: str) -> Iterator[Found]:
    for row, another in zip(one.rows, other.rows, strict=False):
        pairs: dict[str, tuple[Any, Any]] = {"tokens": (row.tokens, another.tokens)}
        shared = row.columns.keys() & another.columns.keys()
        pairs |= {name: (row.columns[name], another.columns[name]) for name in sorted(shared)}
        for name, (mine, theirs) in pairs.items():
            if len(mine) != len(theirs):
                yield _rank(name), name, where, (len(mine), len(theirs))
            elif unlike := np.flatnonzero(mine != theirs).tolist():
                at = unlike[0]
                if not (math.isnan(float(mine[at])) and math.isnan(float(theirs[at]))):
                    yield _rank(name), name, f"{where}, token {at}", (mine[at].item(), theirs[at].item())


def _rank(name: str) -> int:
    """The place in ORDER of a metric or column."""
    if name in ("truncated", "kl/old"):
        return PLACES["truncated"] if name == "truncated" else PLACES["ratio"]
    return PLACES.get(name, PLACES.get(name.split("/")[0], len(ORDER)))


def _keys(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The keys in which two recipes differ, each with both values."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = (dict(enumerate(tree)) for tree in (one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            if where or key not in RECIPE:
                yield from _keys(one.get(key), other.get(key), f"{where}.{key}".lstrip("."))
    elif one != other:
        yield f"{where}: {one} and {other}"
