"""Records of the log files: what they are made of (metrics of a step, its answers), and how they are read.

Run folders of older versions have other names in them; `RENAMED` is the one table of old and new names."""

import json
import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.types import Episode, Turn, recipe_spans

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
TIMINGS = "timings.jsonl"
FILES = (METRICS, ROLLOUTS, TIMINGS)
KINDS = ("train", "evaluation", "resume", "data")

Record = dict[str, Any]

RENAMED = {  # file of a run folder: old name -> name today
    "metrics.jsonl": {
        "mismatch/mean": "sampler_logprob_gap",
        "groups/equal": "zero_variance_groups",
        "broken": "environment_errors",
        "broken/low": "environment_errors/low",
        "broken/high": "environment_errors/high",
    },
    "rollouts.jsonl": {"parts": "reward_components", "broken": "error"},
    "turns": {"minimum": "min_new_tokens"},  # of a record of rollouts.jsonl
}


def rename_record(record: Mapping[str, Any], file: str) -> dict[str, Any]:
    """A record of a run folder's file under the names of today.

    Example:
        >>> rename_record({"step": 3, "groups/equal": 0.5}, "metrics.jsonl")
        {'step': 3, 'zero_variance_groups': 0.5}
    """
    names = RENAMED.get(file, {})
    renamed = {names.get(name, name): value for name, value in record.items()}
    if "turns" in renamed:
        renamed["turns"] = [rename_record(turn, "turns") for turn in renamed["turns"]]
    return renamed


def rename_evaluations(evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluations of a summary.json or a checkpoint under the names of today."""
    return {
        moment: {**kept, "results": rename_record(kept["results"], "metrics.jsonl")}
        if isinstance(kept, Mapping) and "results" in kept
        else kept
        for moment, kept in evaluations.items()
    }


def read_records(path: Path) -> Iterator[Record]:
    """The records of a .jsonl file in order, under the names of today; an incomplete last line, as a killed run can
    leave, is skipped.

    Raises LmgymError for a missing file, and (with its number) for a line that is not a record."""
    if not path.is_file():
        raise LmgymError(f"there is no file {path}")
    return (rename_record(record, path.name) for _, record in lines(path))


def lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """The lines of a .jsonl file as they are, each with its record; as `read_records` otherwise."""
    with open(path, "rb", opener=at_once) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # incomplete: the run was killed during this write
            try:
                record = json.loads(line)
                whole = record["kind"] in KINDS and {type(record["stage"]), type(record["step"])} == {int}
            except (ValueError, KeyError, TypeError, RecursionError):
                whole = False
            if not whole:
                lacking = "this is no record with kind, stage and step; delete the line"
                raise LmgymError(f"{path} line {number}: {lacking}")
            yield line, record


class StepClock:
    """Converts (stage, step) to steps counted through all stages, given all records in order.

    The length of a stage follows from its records, so a stage that stopped early counts only the steps that it ran. The
    position is the number of updates before the record: train and evaluation records of the same step have the same.

    Example:
        >>> clock = StepClock()
        >>> [clock.position({"kind": "train", "stage": 0, "step": step}) for step in (0, 1, 2)]
        [0, 1, 2]
        >>> clock.position({"kind": "evaluation", "stage": 1, "step": 0})
        3
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    @property
    def end(self) -> int:
        """The number of steps that all stages ran."""
        return sum(self.lengths.values())

    def start(self, stage: int) -> int:
        """The number of steps that all earlier stages ran."""
        return sum(length for earlier, length in self.lengths.items() if earlier < stage)

    def position(self, record: Record) -> int:
        """Take the next record and return the number of steps before it."""
        stage, step = int(record["stage"]), int(record["step"])
        done = step + (record["kind"] == "train")
        self.lengths[stage] = max(done, self.lengths.get(stage, 0))
        return self.start(stage) + step


def at_once(path: str, flags: int) -> int:
    """An `opener` for `open`, with which a pipe that nobody reads is an OSError, and no endless wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of the episodes sampled in a step: their number, the mean of the reward and of its components, lengths
    (tokens), mean number of turns (if any episode has several), the shares of truncated and of selected episodes, the
    shares that filled the model's context and whose environment failed (if any), the means of the numbers in
    `Turn.info`, and the share of groups with equal scores, from which a group baseline learns nothing. What was not
    judged is in no mean of a reward; its shares are "unjudged" (by no reward) and "unjudged/NAME" (by this reward). An
    episode whose environment failed counts as one, with what it has noted, and is in none of the other means.

    Example: {"answers": 256.0, "reward": 0.53, "reward/final_answer": 0.5, "length/mean": 4.2, "length/max": 8.0, ...}
    """
    count, whole = len(episodes), [episode for episode in episodes if not episode.error]
    lengths = [sampled_tokens([episode]) for episode in whole]
    # Scores of each group, for the share of groups without a difference.
    scores: dict[int, list[float]] = {}
    judged = [episode for episode in whole if episode.judged]
    for episode in judged:
        scores.setdefault(episode.group, []).append(episode.score)
    groups = list(scores.values())
    components: dict[str, list[float]] = {}  # what a reward function notes, it may note of some answers only
    unjudged = Counter({"unjudged": len(whole) - len(judged)} if len(judged) < len(whole) else {})
    for name, number in (item for episode in whole for item in episode.reward_components.items()):
        if number is None:
            unjudged[f"unjudged/{name}"] += 1
        else:
            components.setdefault(name, []).append(number)
    return {
        "answers": float(count),
        "reward": sum(episode.score for episode in judged) / len(judged) if judged else math.nan,
        **{f"reward/{name}": sum(values) / len(values) for name, values in components.items()},
        **{name: number / len(whole) for name, number in unjudged.items()},
        "length/mean": sum(lengths) / len(whole) if whole else math.nan,
        "length/max": float(max(lengths, default=math.nan)),
        "truncated": sum(episode.truncated for episode in whole) / len(whole) if whole else math.nan,
        **({"truncated/context": full / len(whole)} if (full := sum(e.overflowed for e in whole)) else {}),
        "selected": sum(episode.selected for episode in episodes) / count,
        **({"environment_errors": broken / count} if (broken := sum(bool(e.error) for e in episodes)) else {}),
        **({"turns/mean": turns / len(whole)} if (turns := sum(len(e.turns) for e in whole)) > len(whole) else {}),
        **{f"environment/{name}": sum(values) / len(values) for name, values in environment_numbers(episodes).items()},
        **(
            {"zero_variance_groups": sum(min(g) == max(g) for g in groups) / len(groups)}
            if 0 < len(groups) < len(judged)
            else {}
        ),
    }


def environment_numbers(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """The finite numbers that environments have noted, by name: one for each turn that has it.

    Example:
        >>> turns = [Turn([1], [2], info={"invalid": "no number"}), Turn([3], [4], info={"right": 1.0})]
        >>> environment_numbers([Episode(Example("a/0", ""), 0, 0, turns)])
        {'right': [1.0]}
    """
    found: dict[str, list[float]] = {}
    for name, note in (note for episode in episodes for turn in episode.turns for note in turn.info.items()):
        if not isinstance(note, str) and math.isfinite(note):
            found.setdefault(name, []).append(float(note))
    return found


def version_lag(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """How many updates older than `version` the weights are that sampled the selected episodes, on average over an
    answer's tokens, then over the answers; nothing if none is older. If several versions have sampled an answer, also
    the range over all tokens, and the share of such answers.

    Example: a fresh answer, and one of a replay buffer
        >>> example = Example("a/0", "2+2=")
        >>> version_lag([Episode(example, 0, 0, version=7), Episode(example, 1, 1, version=3)], version=7)
        {'version_lag': 2.0}
    """
    selected = [episode for episode in episodes if episode.selected]
    parts = [version_parts(episode) for episode in selected]
    lags = [sum((version - own) * count for own, count in one) / sum(count for _, count in one) for one in parts]
    if not any(lags):
        return {}
    found = {"version_lag": sum(lags) / len(lags)}
    continued = sum(len(one) > 1 for one in parts)
    if continued:
        every = [version - own for one in parts for own, _ in one]
        found |= {"version_lag/least": min(every), "version_lag/most": max(every), "continued": continued / len(parts)}
    return found


def version_parts(episode: Episode) -> list[tuple[int, int]]:
    """The versions of the weights that sampled an answer, each with the number of its tokens.

    Example: version_parts(episode) -> [(3, 64), (4, 20)]"""
    parts = [(own, count) for turn in episode.turns for own, count in turn.versions]
    return parts or [(episode.version, 1)]


def rollout_record(episode: Episode) -> dict[str, Any]:
    """An episode as a record of rollouts.jsonl: texts, sampled ids, rewards, and why each turn stopped. What was not
    judged has None for its score or the reward. `recipe_spans` says how the model was asked (`with_recipe_spans`), of
    every text: one without spans went through the chat template."""
    spans = recipe_spans(episode.example.prompt)
    return {
        "example": episode.example.id,
        "group": episode.group,
        "index": episode.index,
        "prompt": episode.example.prompt,
        **({"recipe_spans": spans} if spans or isinstance(episode.example.prompt, str) else {}),
        "references": list(episode.example.references),
        "turns": [_turn_record(turn) for turn in episode.turns],
        "reward_components": episode.reward_components,
        "score": episode.score if episode.judged else None,
        **({"error": episode.error} if episode.error else {}),
        **({"reward_errors": episode.reward_errors} if episode.reward_errors else {}),
        **({"by": episode.by} if episode.by else {}),
        "version": episode.version,
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    """A turn as a record, without its kept sets, which would add a bit for each action and token of the vocabulary, and
    without its seconds, in which no two runs are equal (timings.py)."""
    record = dict(vars(turn))  # not `asdict`, which copies every list number by number
    del record["kept"], record["seconds"]
    for name in ("given", "info", "versions"):
        if not record[name]:
            del record[name]
    return record


def sampled_tokens(episodes: Sequence[Episode]) -> int:
    """Tokens that the policy sampled in these episodes."""
    return sum(len(turn.action_ids) for episode in episodes for turn in episode.turns)


def peak_memory_gib() -> float:
    """Peak memory of this process in GiB (main memory, not a GPU's)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
