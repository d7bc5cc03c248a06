"""The traces/ of a run that is trained: written step by step, joined by hundreds, kept within a size, taken back to a
checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from zipfile import ZipFile

from lmgym.core.files import HIDDEN, flush
from lmgym.logs.traces.files import (
    TOGETHER,
    TRACES,
    DamagedTrace,
    Place,
    files_of,
    members,
    opened,
    pack_name,
    stored,
    without_episodes,
    write_pack,
)
from lmgym.logs.traces.texts import TraceTexts
from lmgym.logs.traces.trace import TraceEpisode, TraceStep, write_shard
from lmgym.logs.writer import disk_errors, replace_file

SPARE = 0.9  # of its size, to which a folder that has grown too large is brought back


class TraceFolder:
    """Writes the steps of a run, joins them by hundreds, and keeps the folder within `most` bytes: the oldest steps
    lose their answers first and keep their table, which they lose by hundreds where tables alone are too much. The
    newest step is always whole, and the newest hundred keep their tables. `warn` is told of damaged files.

    Example:
        >>> folder = TraceFolder(Path("runs/a"), most=2**30, warn=print)
        >>> folder.write(step, episodes)
        >>> folder.sync()
    """

    def __init__(self, folder: Path, most: float, warn: Callable[[str], None]) -> None:
        self.folder, self.traces, self.most = folder, folder / TRACES, most
        self._warn, self._told = warn, set[str]()
        self._unsynced: list[Path] = []
        self._begun = False
        self._pruned: Place | None = None  # up to here no step has answers any more
        self._size = self._measure()

    def write(self, step: TraceStep, episodes: Iterable[TraceEpisode], texts: TraceTexts | None = None) -> None:
        """Write one step. Raises LmgymError if the disk is full, or the folder cannot be written."""
        if not self._begun or step.step % TOGETHER == 0:
            self._tell(join_finished(self.traces, step.stage, step.step))
            self._unsynced = [path for path in self._unsynced if path.exists()]  # what was joined is on the disk
            self._begun, self._size = True, self._measure()
        path = write_shard(self.folder, step, episodes, texts)
        self._unsynced.append(path)
        self._size += path.stat().st_size
        if self._size > self.most:
            with disk_errors(self.traces):
                self._pruned, sentences = prune(self.traces, SPARE * self.most, self._pruned)
            self._tell(sentences)
            self._size = self._measure()

    def sync(self) -> None:
        """Put all steps on the disk: a checkpoint may come after them only then."""
        with disk_errors(self.traces):
            for path in self._unsynced:
                flush(path)
            if self._unsynced:
                flush(self.traces)
        self._unsynced = []

    def _measure(self) -> int:
        with disk_errors(self.traces):
            return sum(path.stat().st_size for *_, path in files_of(self.traces))

    def _tell(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if sentence not in self._told:
                self._warn(sentence)
        self._told.update(sentences)


def join(traces: Path, stage: int, step: int) -> None:
    """Join the single steps of a step's hundred in one file, with those that are joined already; then delete the single
    ones. A kill in between leaves both, and the next call goes on. Raises DamagedTrace if the file of the hundred is
    damaged; everything is then as it was."""
    pack = traces / pack_name(stage, step)
    files = files_of(traces)
    singles = {place: path for place, several, path in files if not several and pack_name(*place) == pack.name}
    with ExitStack() as stack:
        old = stack.enter_context(opened(pack)) if pack.exists() else None
        joined = {place: info for place, info in (members(old) if old else []) if place not in singles}

        def contents() -> Iterator[tuple[Place, bytes]]:
            for place in sorted([*singles, *joined]):
                yield place, singles[place].read_bytes() if place in singles else stored(old, joined[place]).read()  # type: ignore[arg-type]

        write_pack(pack, contents())
    with disk_errors(traces):
        for path in singles.values():
            path.unlink(missing_ok=True)


def join_finished(traces: Path, stage: int, step: int) -> list[str]:
    """Join the single steps of all hundreds but this step's; returns a sentence for each that is damaged."""
    current, sentences = pack_name(stage, step), []
    hundreds = {pack_name(*place): place for place, several, _ in files_of(traces) if not several}
    for place in (place for name, place in sorted(hundreds.items()) if name != current):
        try:
            join(traces, *place)
        except DamagedTrace as error:
            sentences.append(str(error))
    return sentences


def prune(traces: Path, most: float, after: Place | None = None) -> tuple[Place | None, list[str]]:
    """Take the answers out of the oldest steps, except for the newest file's, until the folder has at most `most`
    bytes; if that is not enough, delete the oldest files of a hundred steps, except for the newest whole hundred.
    Steps up to `after` are known to have no answers. Returns the last step that has none now, and a sentence for each
    file that is damaged."""
    files, sentences = files_of(traces), list[str]()
    size = sum(path.stat().st_size for *_, path in files)
    for place, several, path in files[:-1]:
        if size <= most:
            break
        last = (place[0], place[1] + TOGETHER - 1) if several else place
        if after is not None and last <= after:
            continue
        before = path.stat().st_size
        try:
            after = (_prune_pack(path, size - most, after) if several else _prune_shard(path, place)) or after
        except DamagedTrace as error:
            sentences.append(str(error))
            after = place if after is None else max(after, place)
        size += path.stat().st_size - before
    current = pack_name(*files[-1][0]) if files else ""
    hundreds = [path for _, several, path in files if several and path.name != current]
    for path in hundreds[:-1]:
        if size <= most:
            break
        size -= path.stat().st_size
        path.unlink()
    return after, sentences


def _prune_shard(path: Path, place: Place) -> Place:
    with opened(path) as shard:
        rest = without_episodes(shard)
    if rest is not None:
        replace_file(path, lambda file: file.write(rest))
    return place


def _prune_pack(path: Path, surplus: float, after: Place | None) -> Place | None:
    """Take the answers out of as many steps as make up for the surplus, the oldest first; returns the last of them."""
    with opened(path) as pack:
        old = [(place, info) for place, info in members(pack) if after is None or place > after]
        if not old:
            return after
        rests: dict[Place, bytes] = {}
        for place, info in old:
            if surplus <= 0:
                break
            with ZipFile(stored(pack, info)) as shard:
                rest = without_episodes(shard)
            if rest is not None:
                rests[place] = rest
                surplus -= info.file_size - len(rest)
            after = place
        if rests:
            write_pack(path, ((place, rests.get(place) or stored(pack, info).read()) for place, info in members(pack)))
    return after


def rewind_traces(folder: Path, stage: int, step: int) -> list[str]:
    """Delete what comes after a checkpoint that was saved after `step` updates of `stage`, and what a kill has left;
    returns a sentence for each file that is damaged. Raises LmgymError if the folder cannot be changed.

    Example: rewind_traces(Path("runs/a"), stage=1, step=40)   # the run goes on with step 40 of its second stage"""
    traces, sentences = folder / TRACES, list[str]()
    for place, several, path in files_of(traces):
        with disk_errors(path):
            if place >= (stage, step):
                path.unlink()
                continue
        try:
            if several and (stage, step) < (place[0], place[1] + TOGETHER):
                _rewind_pack(path, (stage, step))
        except DamagedTrace as error:
            sentences.append(str(error))
    with disk_errors(traces):
        for hidden in traces.glob(f"{HIDDEN}*"):
            hidden.unlink()
    return sentences


def _rewind_pack(path: Path, end: Place) -> None:
    with opened(path) as pack:
        found = members(pack)
        if any(place >= end for place, _ in found):
            write_pack(path, ((place, stored(pack, info).read()) for place, info in found if place < end))
