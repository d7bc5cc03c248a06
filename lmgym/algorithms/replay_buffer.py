"""The buffer of replay: groups of episodes of earlier steps, as JSON in a checkpoint and as a file.

The file is JSON Lines. Its first line is {"format": "lmgym replay buffer", "version": 1, "groups": G}; each of the G
lines after it is one group, a list of episodes, the oldest group first. An episode has the fields of `types.Episode`,
its turns those of `types.Turn`; of kept sets the shape and the bytes in base64. Floats come back bit for bit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmgym.algorithms.base import UpdateContext
from lmgym.core import seeds
from lmgym.core.errors import LmgymError, describe
from lmgym.core.files import lines_of, open_regular, replacing
from lmgym.types import Episode, Turn

Group = list[Episode]
HEADER = {"format": "lmgym replay buffer", "version": 1}


@dataclass
class ReplayBuffer:
    """What an algorithm keeps of earlier steps: groups of episodes, the oldest first."""

    groups: list[Group] = field(default_factory=list)
    fresh: list[Group] = field(default_factory=list)  # of the step in flight
    key: int = 0  # random key of the next step's draw
    begun: bool = False  # a step has begun, or a checkpoint was read; the file to begin with is then no longer read

    def begin_step(self, fresh: list[Group], max_age: int, file: str | None) -> list[Group]:
        """Take note of a step's fresh groups; returns the older ones, without those of more than `max_age` updates ago.
        `file` is read at the first step; its groups count as sampled one update before it.

        Raises LmgymError as `read_buffer` does, and if they cannot be in one batch with the fresh ones."""
        self.fresh, now = fresh, max(episode.version for group in fresh for episode in group)
        if file and not self.begun:
            loaded = read_buffer(file)
            check_alike(loaded, fresh)
            self.groups = [[replace(episode, version=now - 1) for episode in group] for group in loaded]
        self.begun = True
        self.groups = [group for group in self.groups if now - group[0].version <= max_age]
        return self.groups

    def draw(self, count: int, replayed: int) -> list[int]:
        """`replayed` of the numbers below `count`, none twice, in order: a function of the key."""
        return sorted(seeds.permutation(count, self.key, "replay")[:replayed].tolist())

    def end_step(self, groups: list[Group], context: UpdateContext, file: str | None) -> None:
        """Keep these groups for the steps to come, and write them to the `file`."""
        # `meta` is for rewards, which have been paid, and need not be JSON; messages are for showing only.
        self.groups, self.fresh = (
            [[replace(one, example=replace(one.example, meta={}), messages=[]) for one in group] for group in groups],
            [],
        )
        self.key = seeds.key(*context.path, "step", context.step)
        if file and context.writes_files:
            write_buffer(file, self.groups)

    def state_dict(self) -> dict[str, Any]:
        """The groups and the key, as JSON values."""
        return {"key": self.key, "buffer": [[episode.to_json() for episode in group] for group in self.groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.key, self.begun = state["key"], True
        self.groups = [[Episode.from_json(tree) for tree in group] for group in state["buffer"]]


def write_buffer(path: str | Path, groups: Sequence[Group]) -> None:
    """Write groups of episodes to a file, whole or not at all. Raises LmgymError if it cannot be written."""
    path = Path(path).expanduser()
    try:
        with replacing(path) as file:
            file.write((json.dumps({**HEADER, "groups": len(groups)}) + "\n").encode())
            file.writelines((json.dumps([one.to_json() for one in group]) + "\n").encode() for group in groups)
    except OSError as error:
        raise LmgymError(f"algorithm.save_buffer: cannot write {path}: {error.strerror or error}") from error


def read_buffer(path: str | Path, vocabulary: int | None = None) -> list[Group]:
    """The groups that `write_buffer` has written.

    Raises LmgymError, with the file and the line, if it is no such file, or if it has token ids that a `vocabulary` of
    this size does not have."""
    path = Path(path).expanduser()
    where = f"algorithm.load_buffer: {path}"
    groups: list[Group] = []
    try:
        with open_regular(path) as file:
            lines = lines_of(file, path)
            header = _header(next(lines, b""), where)
            for number, line in enumerate(lines, start=2):
                groups.append(_group(line, f"{where}:{number}", vocabulary))
    except OSError as error:
        raise LmgymError(f"algorithm.load_buffer: cannot read {path}: {error.strerror or error}") from error
    if len(groups) != header["groups"]:
        raise LmgymError(f"{where} has {len(groups)} groups and should have {header['groups']}: it is not whole")
    return groups


def check_replay(replayed: int, capacity: int, of: str, load: str | None, save: str | None) -> None:
    """Raise LmgymError if more is replayed than is kept (`of`: groups or turns), or if a buffer would replace the file
    that the run began with: begun anew, it would be another."""
    if replayed > capacity:
        raise LmgymError(
            f"algorithm.replayed is {replayed}, and the buffer holds capacity ({capacity}) {of}; raise capacity, or "
            "lower replayed"
        )
    if load and save and Path(load).expanduser().resolve() == Path(save).expanduser().resolve():
        raise LmgymError(f"algorithm.save_buffer is {save}, which load_buffer reads; save to another file")


def check_alike(groups: Sequence[Group], fresh: Sequence[Group]) -> None:
    """Raise LmgymError if loaded groups cannot be in one batch with fresh ones: of another kind of model, or sampled
    with truncation (top_k, top_p, min_p, masks) and the others not."""
    turns = [[turn for group in several for episode in group for turn in episode.turns] for several in (groups, fresh)]
    for name, says in (("source_ids", "the input of an encoder"), ("kept", "kept sets, of truncated sampling")):
        loaded, own = ({_has(turn, name) for turn in several} for several in turns)
        if len(loaded | own) > 1:
            which, others = ("its", "those of this run") if True in loaded else ("this run's", "its answers")
            raise LmgymError(
                f"algorithm.load_buffer: {which} answers have {says}, and {others} have not; load a buffer of the same "
                "kind of model and of sampling"
            )


def _header(line: bytes, where: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if {key: header[key] for key in HEADER} == HEADER and type(header["groups"]) is int:
            return dict(header)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise LmgymError(
        f"{where} is no replay buffer of this version of lmgym: it must begin with the line "
        f"{json.dumps({**HEADER, 'groups': 0})[:-2]}N}}; algorithm.save_buffer writes such a file"
    )


def _group(line: bytes, where: str, vocabulary: int | None) -> Group:
    try:
        group = [Episode.from_json(tree) for tree in json.loads(line)]
        ids = [id for episode in group for turn in episode.turns for id in _ids(turn)]
        whole = all(
            turn.action_ids and len(turn.action_ids) == len(turn.logprobs)
            for episode in group
            for turn in episode.turns
        )
        if not group or not whole:
            raise ValueError("an answer without tokens, or without the log-probability of each")
        lowest, highest = min(ids, default=0), max(ids, default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LmgymError(f"{where} is no group of episodes ({describe(error)})") from error
    if lowest < 0 or (vocabulary and highest >= vocabulary):
        raise LmgymError(
            f"{where} has the token {lowest if lowest < 0 else highest}, and the model's vocabulary has {vocabulary} "
            "tokens; load a buffer of a model with the same tokenizer"
        )
    return group


def _has(turn: Turn, name: str) -> bool:
    value = getattr(turn, name)
    return value is not None and len(value) > 0


def _ids(turn: Turn) -> list[int]:
    ids = [*turn.prompt_ids, *turn.action_ids, *turn.source_ids]
    if not all(type(id) is int for id in ids):
        raise TypeError("a token id that is no whole number")
    return ids
