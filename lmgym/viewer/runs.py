"""The runs that a page shows: their records, read when they are looked at, and read on while a run trains."""

import re
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.logs.records import METRICS, ROLLOUTS, TIMINGS
from lmgym.logs.run_folders import check_there, is_run, runs_in
from lmgym.logs.traces import trace as traces
from lmgym.logs.traces.files import TRACES, pack_name, shard_name
from lmgym.logs.traces.texts import TraceTexts, read_texts
from lmgym.logs.traces.trace import TraceEpisode, TraceStep
from lmgym.viewer.curves import Curves
from lmgym.viewer.episodes import episode_of_record
from lmgym.viewer.rollouts import Moment, Rollouts
from lmgym.viewer.tail import inside


class RunRecords:
    """One run folder. Every method reads what is new first, so that a run can be looked at while it trains; calls may
    come from several threads. Nothing in the folder is changed.

    Raises LmgymError for a folder without metrics.jsonl.

    Example: RunRecords(Path("runs/a"), "a").trace(stage=0, step=12).episodes["score"]"""

    def __init__(self, folder: Path, name: str) -> None:
        if not is_run(folder):
            raise LmgymError(f"{folder} holds no {METRICS}, so it is no run folder; name one, as runs/quickstart")
        self.folder, self.name = folder, name
        self.lock = threading.RLock()
        self._curves, self._rollouts, self._timings = Curves(folder), Rollouts(folder), Rollouts(folder, TIMINGS)

    @property
    def curves(self) -> Curves:
        """The numbers of metrics.jsonl, up to date."""
        with self.lock:
            self._curves.update()
            return self._curves

    @property
    def rollouts(self) -> Rollouts:
        """The places of the answers in rollouts.jsonl, up to date."""
        with self.lock:
            self._rollouts.update()
            return self._rollouts

    @property
    def timings(self) -> Rollouts:
        """The places of the steps in timings.jsonl, up to date."""
        with self.lock:
            self._timings.update()
            return self._timings

    def problems(self) -> list[str]:
        """What is wrong with rollouts.jsonl and timings.jsonl, as far as they were read."""
        return [*self._rollouts.problems, *self._timings.problems]

    def timing(self, stage: int, step: int) -> dict[str, Any]:
        """What timings.jsonl says of a step; empty if it says nothing."""
        records = self.timings.records(Moment("train", stage, step))
        return records[-1] if records else {}

    def trace(self, stage: int, step: int) -> TraceStep | None:
        """The table that traces/ has of a step; None if it has nothing. Raises LmgymError if it is damaged."""
        return traces.read_step(self.folder, stage, step) if has_trace(self.folder, stage, step) else None

    def texts(self, stage: int, step: int) -> TraceTexts:
        """The words of those answers of a step that were not kept whole, as far as the run has them."""
        try:
            return read_texts(self.folder, stage, step) if has_trace(self.folder, stage, step) else TraceTexts()
        except (LmgymError, ValueError, RecursionError):
            return TraceTexts()

    def answers(
        self, moment: Moment, wanted: Collection[int], trace: TraceStep | None, split: str | None = None
    ) -> dict[int, TraceEpisode]:
        """Those of the wanted answers that were kept, by index: from traces/ (`trace` is the step's table), or else
        from rollouts.jsonl."""
        found: dict[int, TraceEpisode] = {}
        if trace is not None:
            for index, kept in zip(trace.episodes["index"], trace.episodes["kept"], strict=True):
                if kept and index in wanted:
                    with suppress(LmgymError):  # damaged, or pruned since the table was read
                        found[index] = traces.read_episode(self.folder, moment.stage, moment.step, index)
        if missing := set(wanted) - set(found):
            for record in self.rollouts.records(moment):
                if record.get("index") in missing and split in (None, record.get("split")):
                    found[record["index"]] = episode_of_record(record)
        return found

    def neighbours(self, stage: int, step: int) -> list[tuple[int, int] | None]:
        """(stage, step) of the steps before and after; None at the ends."""
        steps = self.curves.steps
        if (stage, step) not in steps:
            return [None, None]
        row, places = steps[stage, step], self._curves.tables["train"].places
        around = [places[row - 1] if row else None, places[row + 1] if row + 1 < len(places) else None]
        return [place and place[1:] for place in around]

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe; empty if it cannot be read."""
        try:
            recipe = read_yaml(inside(self.folder, "recipe.yaml"))
        except LmgymError:
            return {}
        return recipe if isinstance(recipe, dict) else {}

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer, of the library tokenizers; None if the folder has no tokenizer.json."""
        with self.lock:
            if self._tokenizer is None:
                self.__dict__.pop("_tokenizer")  # a run that has just begun may not have written it yet
                return None
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        saved = [inside(self.folder, name, "tokenizer.json") for name in ("tokenizer", "final", "best")]
        saved += sorted(inside(self.folder, "checkpoints").glob("stage-*/tokenizer.json"), reverse=True)
        for path in saved:
            if path.is_file():
                try:
                    return Tokenizer.from_file(str(inside(self.folder, *path.relative_to(self.folder).parts)))
                except Exception as error:  # the library raises Exception itself
                    raise LmgymError(f"{path} is no tokenizer that the library tokenizers reads: {error}") from error
        return None

    def state(self) -> dict[str, Any]:
        """Sizes that grow while the run trains, and the seconds since it last wrote."""
        sizes, newest = {}, 0.0
        for name in (METRICS, ROLLOUTS, TRACES, TIMINGS):
            path = self.folder / name
            if path.exists():
                status = path.stat()
                sizes[name] = [status.st_ino, status.st_mtime_ns, status.st_size]
                newest = max(newest, status.st_mtime)
        return {"sizes": sizes, "age": max(0.0, time.time() - newest)}


def has_trace(folder: Path, stage: int, step: int) -> bool:
    """Whether traces/ of a run folder has a step. Raises LmgymError if what it has is a link that leads out."""
    inside(folder, TRACES)
    return any(inside(folder, TRACES, name(stage, step)).exists() for name in (shard_name, pack_name))


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting names as people do, with numbers by their size.

    Example:
        >>> sorted(["seed-10", "seed-2", "seed-1"], key=natural)
        ['seed-1', 'seed-2', 'seed-10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,18})", name)]


def open_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """The runs of some folders, in order; of a folder of runs (several seeds or settings) all of them.

    Raises LmgymError for a folder that is neither.

    Example: [run.name for run in open_runs([Path("runs/sweep")])] -> ["sweep/seed-0", "sweep/seed-1"]"""
    runs = []
    for folder in folders:
        check_there(folder)
        name, members = folder.resolve().name, sorted(runs_in(folder), key=lambda path: natural(path.name))
        if members in ([], [folder]):
            runs.append(RunRecords(folder, name))
        else:
            runs += [RunRecords(member, f"{name}/{member.name}") for member in members]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs
