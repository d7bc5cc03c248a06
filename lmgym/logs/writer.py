"""The records in a run folder, metrics.jsonl, rollouts.jsonl and timings.jsonl: one JSON object per line; sinks on
request.

A record is a flat dictionary with "kind" ("train", "evaluation", "resume" or "data"), "stage" and "step", both counted
from 0. With them a resumed run can drop the records of steps that it repeats (rewind.py). The train record of step s
describes the update of the policy from version s to s + 1; the evaluation record of step s describes the policy after s
updates; a resume record says what was no longer the same when the run went on after s updates."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lmgym.core.errors import LmgymError, describe, warn
from lmgym.core.files import flush, replacing
from lmgym.logs.records import FILES, KINDS, METRICS, ROLLOUTS, TIMINGS, Record, StepClock, at_once, lines, read_records
from lmgym.logs.sinks import Sink, answer_rows, open_sink

if TYPE_CHECKING:
    from lmgym.logs.console import Console

SENT = "sinks.json"


class Writer:
    """Appends records to a run folder. Each line is passed to the system at once, so a killed run loses nothing; `sync`
    puts them on the disk, which a power failure cannot take back. `counts` is the number of records of each file.

    Floats are written with all digits; NaN and infinity, which JSON lacks, become null. `sinks` names trackers
    (logs/sinks.py) that get the `recipe`, the scalar metrics with the key "kind/name" ("evaluation/split/name" if the
    record has a split) and the tracked answers, over steps counted through all stages; sinks.json keeps what each has,
    so that a resumed run sends nothing twice. A sink that fails during the run is dropped, with a warning on the
    console. Opening a folder removes an incomplete last line, which a killed run can leave. A run that resumes calls
    `rewind` before it opens its Writer.

    Raises LmgymError for a record without kind, stage or step, a value that JSON cannot hold, a sink that is unknown or
    not installed, and a full disk.

    Example:
        >>> with Writer(Path("runs/a")) as writer:
        ...     writer.metrics({"kind": "train", "stage": 0, "step": 0, "reward": 0.25})
    """

    def __init__(
        self,
        folder: Path,
        sinks: Iterable[str] = (),
        console: "Console | None" = None,
        recipe: Mapping[str, Any] | None = None,
    ):
        self.folder, self._process = Path(folder), os.getpid()
        self._warn: Callable[[str], None] = console.warn if console else warn
        with disk_errors(self.folder):
            make_folder(self.folder)
        self.counts: dict[str, int] = {}
        self._files: dict[str, Any] = {}
        for name in FILES:
            self._files[name], self.counts[name] = _open(self.folder / name)
        with disk_errors(self.folder):
            flush(self.folder)  # the names of new files, and of those that `rewind` has replaced
        self._clock = StepClock()
        names = list(sinks)
        if names:  # they count steps through all stages, so a resumed run needs the earlier records
            for record in read_records(self.folder / METRICS):
                self._clock.position(record)
        self._sinks: dict[str, Sink] = {
            name: open_sink(name, self.folder, recipe or {}, self._clock.end) for name in names
        }
        self._sent = _read_sent(self.folder / SENT)
        self._had = {name: dict(self._sent.get(name, {})) for name in names}  # when the run was opened

    def metrics(self, record: Record) -> None:
        """Append one record to metrics.jsonl and send its numbers to the sinks."""
        self._append(METRICS, [record])
        if self._sinks:
            step, scalars = self._clock.position(record), _scalars(record)
            self._send(_prefix(record), step, lambda sink: sink.write({**scalars}, step))

    def rollouts(self, records: Iterable[Record]) -> None:
        """Append records (texts, rewards, nested values) to rollouts.jsonl."""
        self._append(ROLLOUTS, records)

    def timings(self, record: Record) -> None:
        """Append one record to timings.jsonl (timings.py)."""
        self._append(TIMINGS, [record])

    def answers(self, records: Iterable[Record]) -> None:
        """Send the tracked answers of one step or of one evaluation, as `rollouts` has them, to the sinks."""
        tracked = list(records) if self._sinks else []
        if tracked:
            step, name = self._clock.position(tracked[0]), _prefix(tracked[0])
            self._send(f"answers/{name}", step, lambda sink: sink.answers(name, answer_rows(tracked), step))

    def finish(self, results: dict[str, float], plot: Path) -> None:
        """Send the results before and after, and the plot, to the sinks."""
        step = self._clock.end
        self._send("finish", step, lambda sink: sink.finish({**results}, plot, step))

    def _send(self, what: str, step: int, send: Callable[[Sink], None]) -> None:
        """Send something to all sinks that do not have it from before the run was resumed."""
        for name, sink in list(self._sinks.items()):
            if step <= self._had[name].get(what, -1):
                continue
            try:
                send(sink)
            except Exception as error:  # a failing tracker must not end the training
                del self._sinks[name]
                self._warn(f"{name} failed and gets nothing more ({describe(error)}); the run folder has all")
                continue
            self._sent.setdefault(name, {})[what] = step
            with disk_errors(self.folder / SENT), replacing(self.folder / SENT, durable=False) as file:
                file.write(f"{json.dumps(self._sent)}\n".encode())

    def sync(self) -> None:
        """Put all records on the disk: a checkpoint may count them only then."""
        for name, file in self._files.items():
            with disk_errors(self.folder / name):
                os.fsync(file.fileno())

    def _append(self, name: str, records: Iterable[Record]) -> None:
        if os.getpid() != self._process:  # a fork made by users' code has returned: one folder, one writer
            os._exit(1)
        for record in records:
            _append(self._files[name], record, self.folder / name)
            self.counts[name] += 1

    def close(self) -> None:
        """Close the files and the sinks; a second call does nothing."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._warn(f"{name} did not close properly ({describe(error)}); the run folder has all")
        self._sinks = {}
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullWriter(Writer):
    """Writes nothing: for the ranks other than the first, which has the records of all."""

    def __init__(self) -> None:
        self._files, self._sinks, self._clock = {}, {}, StepClock()
        self.counts = {}

    def _append(self, name: str, records: Iterable[Record]) -> None:
        pass


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into an LmgymError with a remedy.

    Example:
        >>> with disk_errors(Path("/dev/full")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        lmgym.core.errors.LmgymError: /dev/full: the disk is full (No space left on device); free some space ...
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            then = "free some space, then resume with `lmgym train RUN_FOLDER`"
            raise LmgymError(f"{path}: the disk is full ({reason}); {then}") from error
        raise LmgymError(f"{path}: cannot be written ({reason}); choose a folder that can") from error


def replace_file(path: Path, write: Callable[[BinaryIO], Any], durable: bool = True) -> None:
    """Let `write` fill a new file, which takes the place of `path` (core/files.py: `replacing`), in a folder that is
    made if need be. Raises LmgymError if it cannot be written; `path` is then as it was."""
    with disk_errors(path):
        make_folder(path.parent)
        with replacing(path, durable) as file:
            write(file)


def make_folder(path: Path) -> None:
    """Make a folder with those above it, if they are not there, and put their names on the disk. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def _prefix(record: Record) -> str:
    """What sinks call a record's kind: "train", or "evaluation/SPLIT"."""
    return f"{record['kind']}/{record['split']}" if "split" in record else str(record["kind"])


def _scalars(record: Record) -> dict[str, float]:
    prefix = _prefix(record)
    return {
        f"{prefix}/{name}": value
        for name, value in ((name, _plain(value, name)) for name, value in record.items())
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("stage", "step")
    }


def _read_sent(path: Path) -> dict[str, dict[str, int]]:
    """What each sink has: the last step of each kind of thing. Nothing, where the file is not there or was torn."""
    try:
        sent: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return sent


def _open(path: Path) -> tuple[Any, int]:
    """Open a file without a buffer, and count its records: after write() returns, a kill cannot lose or cut the
    line."""
    with disk_errors(path):
        file = open(path, "ab", buffering=0, opener=at_once)  # noqa: SIM115 (closed by Writer.close)
        whole = [len(line) for line, _ in lines(path)] if path.is_file() else []
        if path.is_file() and sum(whole) < path.stat().st_size:
            file.truncate(sum(whole))
        return file, len(whole)


def _append(file: Any, record: Record, path: Path) -> None:
    line = memoryview(_line(record, path))
    with disk_errors(path):
        before = os.fstat(file.fileno()).st_size
        try:
            while line:  # a raw write may write only a part, shortly before the disk is full
                line = line[file.write(line) :]
        except OSError:
            with suppress(OSError):  # remove the incomplete line, or the next one would continue it
                file.truncate(before)
            raise


def _line(record: Record, path: Path) -> bytes:
    if record.get("kind") not in KINDS:
        raise LmgymError(f"{path.name}: a record has kind {record.get('kind')!r}; it must be one of {KINDS}")
    for name in ("stage", "step"):
        if type(record.get(name)) is not int:
            raise LmgymError(f"{path.name}: a record has {name} {record.get(name)!r}, not a whole number")
    plain = {name: _plain(value, name) for name, value in record.items()}
    try:
        return (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair in a model's text: written as an escape
        return (json.dumps(plain, allow_nan=False) + "\n").encode()


def _plain(value: Any, name: str) -> Any:
    """The value as JSON can hold it: NaN and infinity become None, arrays and tensors numbers or lists."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), name)
    holds = "a record holds numbers, texts, lists and dictionaries"
    raise LmgymError(f"'{name}' is a {type(value).__name__}; {holds}")
