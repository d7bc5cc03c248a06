"""The rows of a split: from files here, or from a data set of the Hugging Face Hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.hub import prepare_hub, unreachable
from lmgym.tasks.rows import MissingSplit, Row
from lmgym.tasks.rows.arrow import table_rows
from lmgym.tasks.rows.find import NAMES, Paths, Source, files_of
from lmgym.tasks.rows.formats import SUFFIXES, rows_of
from lmgym.tasks.rows.indexed import LARGE, IndexedRows, bytes_of, can_stay, indexed, indexed_table

EDGE = r"\s*(-?[0-9]+%?)?\s*"
PART = re.compile(rf"\s*([\w./-]+?)\s*(?:\[{EDGE}:{EDGE}\])?\s*")


@dataclass(frozen=True)
class Part:
    """A part of a split of data, as the datasets library writes it.

    Example: parts_of("train[:5%]", "splits") -> [Part("train", None, "5%")]"""

    name: str
    begin: str | None = None
    end: str | None = None

    @property
    def whole(self) -> bool:
        return self.begin is None and self.end is None

    def range(self, count: int) -> range:
        """The numbers of its rows among `count`: percent are rounded to the nearest row."""
        edges = [self._row(edge, count, usual) for edge, usual in ((self.begin, 0), (self.end, count))]
        return range(*edges)

    def _row(self, edge: str | None, count: int, usual: int) -> int:
        if edge is None:
            return usual
        row = round(int(edge[:-1]) * count / 100) if edge.endswith("%") else int(edge)
        return min(max(row + count if row < 0 else row, 0), count)


def parts_of(text: str, key: str) -> list[Part]:
    """The parts that "train[:5%]+test" names. Raises LmgymError, naming the `key`, for anything else."""
    found = [PART.fullmatch(one) for one in text.split("+")]
    if not all(found):
        raise LmgymError(f"{key} is {text!r}; write a split, or parts of it, such as train[:5%] or train[10:20]+dev")
    return [Part(*one.groups()) for one in found if one]


def load_rows(
    task: str,
    split: str,
    path: Paths | None,
    hub_id: str,
    config: str | None = None,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    columns: Sequence[str] | None = None,
    names: Mapping[str, Sequence[str]] = NAMES,
) -> Iterator[Row]:
    """The rows of a split, one after the other: from the files that `files_of` finds at `path`, or, if it is None, from
    the Hub. "ID@REVISION" names a branch on the Hub. In the branch @refs/convert/parquet the Hub keeps a copy of data
    sets that were once loaded by a script.

    Example:
        >>> next(load_rows("cnn_daily_mail", "validation", "data/cnn", "abisee/cnn_dailymail", "3.0.0"))
        ('data/cnn/validation.csv:2', {'article': '...', 'highlights': '...', 'id': '...'})
    """
    return rows_of_split(Source(task, path, hub_id, config, suffixes=suffixes, columns=columns, names=names), split)


def rows_of_split(source: Source, split: str) -> Iterator[Row]:
    """The rows of a split of a source. Raises MissingSplit if there is none, LmgymError for what cannot be read."""
    return find_split(source, split).rows()


@dataclass(frozen=True)
class Found:
    """The files that hold a split, with the part of their rows that it is; or a table of the Hub.

    Example: find_split(Source("data", "rows", splits={"train": "train[:5%]"}), "train").files[0]"""

    source: Source
    files: list[tuple[list[Path], Part]]
    table: Any = None

    @property
    def paths(self) -> list[Path]:
        return [path for paths, _ in self.files for path in paths]

    def same_rows(self, other: "Found") -> bool:
        """True if the other is of the same files, and of the same part of them, or of an equal table."""
        if self.table is not None or other.table is not None:
            return self.table is not None and other.table is not None and bool(self.table.equals(other.table))
        mine, theirs = (
            [(path, part.begin, part.end) for paths, part in one.files for path in paths] for one in (self, other)
        )
        return mine == theirs

    @property
    def large(self) -> bool:
        """True if its rows had better stay where they are, and can."""
        if self.table is not None:
            return bool(self.table.nbytes > LARGE)
        return all(map(can_stay, self.paths)) and sum(map(bytes_of, self.paths)) > LARGE

    def rows(self) -> Iterator[Row]:
        """Its rows, one after the other."""
        if self.table is not None:
            yield from table_rows(self.table, self.source.hub_id)
        for paths, part in self.files:
            rows = (row for path in paths for row in rows_of(path, self.source.columns))
            if part.whole:
                yield from rows
            else:
                listed = list(rows)
                yield from (listed[number] for number in part.range(len(listed)))

    def indexed(self) -> tuple[tuple[IndexedRows, ...], Sequence[int] | None]:
        """Its rows where they lie, and which of them it has, counted over all files; None: all."""
        if self.table is not None:
            return (indexed_table(self.source.hub_id, self.table),), None
        for path in self.paths:
            if not can_stay(path):
                raise LmgymError(
                    f"task.streaming: the rows of {path} can only be read in turn; unpack it into .jsonl, .arrow or "
                    ".parquet, or remove streaming"
                )
        files, parts = list[IndexedRows](), list[range]()
        for paths, part in self.files:
            before = sum(map(len, files))
            files += [indexed(path) for path in paths]
            own = part.range(sum(map(len, files)) - before)
            parts.append(range(before + own.start, before + own.stop, own.step))
        whole = all(part.whole for _, part in self.files)
        return tuple(files), None if whole else [number for part in parts for number in part]


def find_split(source: Source, split: str) -> Found:
    """Where the rows of a split are. Raises MissingSplit if there is none."""
    if source.path is None:
        return Found(source, [], hub_table(source, split))
    if split not in source.splits:
        return Found(source, [(files_of(source, split), Part(split))])
    parts = parts_of(source.splits[split], f"task.splits.{split}")
    return Found(source, [(files_of(source, split, NAMES.get(part.name, (part.name,))), part) for part in parts])


def hub_table(source: Source, split: str) -> Any:
    """The Arrow table of a split on the Hub, memory-mapped, by the first of its names that the data set has."""
    try:
        import datasets
    except ImportError as error:
        raise LmgymError(
            f"task '{source.task}' needs the datasets library: pip install 'lmgym[data]', or set task.path"
        ) from error
    repository, _, revision = source.hub_id.partition("@")
    given: Mapping[str, Any] = {"revision": source.revision or revision or None, "data_files": source.data_files}
    prepare_hub(repository)
    why = ""
    for name in [source.splits[split]] if split in source.splits else source.names[split]:
        try:
            dataset = datasets.load_dataset(repository, source.config, split=name, **given)
            return dataset.flatten_indices().data.table if dataset._indices is not None else dataset.data.table
        except Exception as error:  # errors of the library, the Hub client, pyarrow or the system
            why = str(error).strip().split("\n")[0]
            if not why.startswith("Unknown split"):
                reason = unreachable() or f"{type(error).__name__}: {why}"
                raise LmgymError(
                    f"task.hub_id: cannot load '{source.hub_id}' ({reason}); where the Hub cannot be reached, set "
                    "task.path to the files"
                ) from error
    raise MissingSplit(f"task '{source.task}' has no split '{split}': '{source.hub_id}' says: {why}")
