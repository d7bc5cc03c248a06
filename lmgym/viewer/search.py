"""Looking for answers through all steps of a run: by numbers, and by a regular expression over the texts.

A search runs in processes of its own (processes/pool.py), so that neither a long one nor an expression that never ends
stops the page; it can be cancelled and has a limit of time."""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmgym.core.errors import LmgymError, describe
from lmgym.logs.records import ROLLOUTS, TIMINGS
from lmgym.logs.timings import timing_columns
from lmgym.logs.traces import trace as traces
from lmgym.logs.traces.files import EPISODES, TRACES, open_shard, read_member
from lmgym.logs.traces.texts import read_texts
from lmgym.processes.pool import Failure, ProcessPool
from lmgym.viewer.episodes import episode_of_record, turn_texts
from lmgym.viewer.rollouts import Moment, read_spans
from lmgym.viewer.runs import RunRecords, has_trace
from lmgym.viewer.tail import inside
from lmgym.viewer.views import step_columns

AROUND, LONGEST = 60, 240  # characters shown of a text before and after what was found, and of that itself
MOST_FOUND = 500
STEP_SECONDS = 5.0  # for one step; an expression that takes longer is too slow for it
TOGETHER = 8  # steps that are asked for at once: a cancelled search ends behind them
OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "=": np.equal,
    "!=": np.not_equal,
}
Filter = tuple[str, str, float]  # name of a number, operator, number


def matching(columns: Mapping[str, Any], filters: Sequence[Filter]) -> np.ndarray:
    """Which answers of a step meet all filters, bool [answers].

    A name is that of a column ("score", "length", "surprise", "truncated" ...), "reward/NAME" for a reward, "error" (1
    if the environment failed), "equal" (1 if all scores of the group are equal), or "spread" (the largest score of the
    group less the smallest; neither for a group of one). An answer that lacks the number meets no filter. Raises
    LmgymError for a name that is no column, or one of texts.

    Example: matching(columns, [("score", "<", 0.5), ("truncated", "=", 1)])"""
    fits = np.ones(len(columns["index"]), dtype=bool)
    for name, operator, wanted in filters:
        if operator not in OPERATORS:
            raise LmgymError(f"a filter has the operator '{operator}'; it must be one of {', '.join(OPERATORS)}")
        values = numbers_of(columns, name)
        fits &= OPERATORS[operator](values, wanted) & ~np.isnan(values)
    return fits


def numbers_of(columns: Mapping[str, Any], name: str) -> np.ndarray:
    """A number per answer [answers]; NaN for an answer that has none. Raises LmgymError as `matching` does."""
    if name in ("equal", "spread"):
        groups, number = np.unique(columns["group"], return_inverse=True)
        scores = np.array([np.nan if score is None else score for score in columns["score"]], dtype=float)
        high, low = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
        np.fmax.at(high, number, scores)
        np.fmin.at(low, number, scores)
        several = np.bincount(number[~np.isnan(scores)], minlength=len(groups)) > 1  # one is not compared with any
        spread = np.where(several, high - low, np.nan)[number]
        return spread if name == "spread" else np.where(np.isnan(spread), np.nan, spread == 0)
    if name.startswith("reward/"):  # not every stage has every reward
        column = columns["reward_components"].get(name.removeprefix("reward/"), [None] * len(columns["index"]))
    elif name in columns:
        column = columns[name]
    elif name.startswith("seconds/"):  # nor are all steps timed
        column = [None] * len(columns["index"])
    else:
        raise LmgymError(f"the step's answers have no number '{name}'")
    if name == "error":
        return np.array([float(bool(value)) for value in column])
    if not all(value is None or isinstance(value, bool | int | float) for value in column):
        raise LmgymError(f"'{name}' is no number to filter by")
    return np.array([np.nan if value is None else float(value) for value in column], dtype=float)


def search_step(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of one step that meet a job's filters and whose text its pattern finds; runs in a worker process.

    Without a pattern the answers need not have been kept whole. Raises LmgymError for a damaged step."""
    folder, stage, step = Path(job["folder"]), job["stage"], job["step"]
    filters, pattern = [tuple(one) for one in job["filters"]], re.compile(job["pattern"])
    if job["traced"] and has_trace(folder, stage, step):
        columns: Mapping[str, Any] = traces.read_step(folder, stage, step).episodes
        if any(name.startswith("seconds/") for name, *_ in filters):
            for timing in read_spans(inside(folder, TIMINGS), job["timings"])[0][-1:]:
                columns = {**columns, **timing_columns(timing, len(columns["index"]))}
        rows = np.flatnonzero(matching(columns, filters)).tolist()
        wanted = [columns["index"][row] for row in rows if columns["kept"][row] and job["pattern"]]
        texts = _texts_of_shard(folder, stage, step, wanted)
        texts |= read_texts(folder, stage, step).answers if job["pattern"] else {}
    else:
        records, _ = read_spans(inside(folder, ROLLOUTS), job["spans"])
        columns = step_columns(records)
        rows = np.flatnonzero(matching(columns, filters)).tolist()
        texts = {records[row]["index"]: turn_texts(episode_of_record(records[row])) for row in rows}
    found = []
    for row in rows:
        answer = {name: columns[name][row] for name in ("index", "group", "score", "length", "kept")}
        if job["pattern"]:
            text = "\n".join(texts.get(answer["index"], ()))
            if (match := pattern.search(text)) is None:
                continue
            begin, end = match.span()
            answer["found"] = [
                text[max(0, begin - AROUND) : begin],
                text[begin:end][:LONGEST],
                text[end : end + AROUND],
            ]
        found.append(answer | {"stage": stage, "step": step})
    return found


def _texts_of_shard(folder: Path, stage: int, step: int, indices: Sequence[int]) -> dict[int, list[str]]:
    """What the model said in each of these answers of a step. Of an answer only the turns are made sense of: its arrays
    are most of it."""
    if not indices:
        return {}
    with open_shard(folder, stage, step) as shard:
        trees = {index: json.loads(read_member(shard, f"{EPISODES}{index:06d}.json")) for index in indices}
    return {index: [turn["given"] + turn["text"] for turn in tree["turns"]] for index, tree in trees.items()}


@dataclass
class Search:
    """A search in the background; `tree` says how far it is. `cancel` ends it soon.

    Raises LmgymError for an expression that is none.

    Example:
        >>> search = Search(run, "####", [("score", "<", 0.5)], seconds=60)
        >>> search.tree()
        {'done': False, 'searched': 16, 'steps': 200, 'found': [...], 'sentence': ''}
    """

    run: RunRecords
    pattern: str
    filters: Sequence[Filter]
    seconds: float
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    found: list[dict[str, Any]] = field(default_factory=list)
    searched: int = 0
    steps: int = 0
    sentence: str = ""
    done: bool = False
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise LmgymError(f"'{self.pattern}' is no regular expression: {error}") from error
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End the search: it looks at no further steps."""
        self._cancelled.set()

    def tree(self) -> dict[str, Any]:
        """What was found so far, newest steps first, and how far the search is."""
        names = ("key", "done", "searched", "steps", "sentence")
        return {name: getattr(self, name) for name in names} | {"found": self.found[:MOST_FOUND]}

    def _work(self) -> None:
        try:
            with self.run.lock:  # what is read of it must not grow meanwhile
                jobs = _jobs(self.run, self.pattern, self.filters)
            with ProcessPool("lmgym.viewer.search:search_step", count=2) as pool:
                self._look(pool, jobs)
        except LmgymError as error:
            self.sentence = str(error)
        except Exception as error:  # records of someone else's making; the page must not wait for ever
            self.sentence = f"the search ended: {describe(error)}"
        finally:
            self.done = True

    def _look(self, pool: ProcessPool, jobs: Sequence[Mapping[str, Any]]) -> None:
        self.steps, end, slow = len(jobs), time.monotonic() + self.seconds, 0
        for begin in range(0, len(jobs), TOGETHER):
            if self._cancelled.is_set():
                self.sentence = f"cancelled after {self.searched:,} of {self.steps:,} steps"
                return
            if time.monotonic() > end or slow >= TOGETHER:
                why = "the expression is too slow" if slow >= TOGETHER else f"{self.seconds:g} seconds are over"
                self.sentence = f"{why}: the newest {self.searched:,} of {self.steps:,} steps were searched"
                return
            part = jobs[begin : begin + TOGETHER]
            for answer in pool.map(part, seconds=STEP_SECONDS, by_clock=True):
                if not isinstance(answer, Failure):
                    self.found += answer
                    continue
                slow += answer.kind == "time"
                self.sentence = self.sentence or f"a step was left out: {answer.message}"
            self.searched += len(part)
            if len(self.found) >= MOST_FOUND:
                self.sentence = (
                    f"the first {MOST_FOUND} of more; {self.searched:,} of {self.steps:,} steps were searched"
                )
                return


def _jobs(run: RunRecords, pattern: str, filters: Sequence[Filter]) -> list[dict[str, Any]]:
    """A job for each step that has answers, the newest first. Raises LmgymError if traces/ cannot be read or is a link
    that leads out of the run folder."""
    inside(run.folder, TRACES)
    traced, rollouts = set(traces.shards(run.folder)), run.rollouts
    spans = {(one.stage, one.step): rollouts.spans[one] for one in rollouts.moments("train")}
    timed = run.timings.spans
    same = {"folder": str(run.folder), "pattern": pattern, "filters": [list(one) for one in filters]}
    return [
        same
        | {"stage": stage, "step": step, "traced": (stage, step) in traced, "spans": spans.get((stage, step), [])}
        | {"timings": timed.get(Moment("train", stage, step), [])}
        for stage, step in sorted({*traced, *spans}, reverse=True)
    ]
