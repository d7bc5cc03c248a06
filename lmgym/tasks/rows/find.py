"""Which files hold a split of a data set: a file, a folder, a pattern, a list of these, or a member of an archive."""

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import nearby, open_regular
from lmgym.tasks.rows import MissingSplit
from lmgym.tasks.rows.formats import SUFFIXES
from lmgym.tasks.rows.unpacked import ARCHIVES, PACKED, archive_of, exists, kind_of, members, readable

Paths = str | Path | Sequence[str | Path]
NAMES: Mapping[str, Sequence[str]] = {  # names that data sets use for the splits
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
SHARD = re.compile(r"-[0-9]+-of-[0-9]+$")
NO_ROWS = re.compile(r"(dataset_infos?|dataset_dict|state|config|package|metadata)\.json|(cache|indices|tmp)-.*|[._].*")
"""Files beside data that hold none: what the datasets library writes about it or keeps for itself, hidden ones."""


@dataclass(frozen=True)
class Source:
    """Where the rows of a task are: at `path` here, or in a data set of the Hugging Face Hub.

    `splits` gives other names, and parts as the datasets library writes them. `named` alone decides what a single file
    holds: with False it is `train`, whatever its name.

    Example: Source("data", "data/ultrafeedback", splits={"train": "train_prefs[:5%]", "test": "test_prefs"})"""

    task: str
    path: Paths | None = None
    hub_id: str = ""
    config: str | None = None
    revision: str | None = None
    data_files: Any = None
    splits: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=lambda: NAMES)
    suffixes: Sequence[str] = SUFFIXES
    columns: Sequence[str] | None = None
    named: bool = True

    def missing(self, split: str, why: str) -> MissingSplit:
        return MissingSplit(f"task '{self.task}' has no split '{split}': {why}")


def files_of(source: Source, split: str, names: Sequence[str] | None = None) -> list[Path]:
    """The files of a split ("train", "validation", "test"), in reading order. `names` are what the data calls it.

    In a pattern "{split}" is replaced by each of the names; the first that gives files is taken. A folder has a
    subfolder of such a name, or files with such a word in their names: one file, or the shards of one
    (train-00000-of-00002.parquet), of the first of the suffixes that occurs; here, in the folder of `config`, or in
    `data`. A folder whose files name no split is train as a whole. A single file holds the split in its name, else
    train. Of a list, all that hold the split.

    Raises MissingSplit if the split is missing, LmgymError if the path is missing or a folder has several data sets.

    Example: files_of(Source("totto", "totto"), "validation") -> [PosixPath('totto/totto_dev_data.jsonl')]"""
    names = source.names[split] if names is None else names
    if isinstance(source.path, (str, Path)):
        return _at(source, Path(source.path).expanduser(), split, names)
    found, missing = list[Path](), source.missing(split, "task.path is an empty list")
    for path in source.path or ():
        try:
            found += _at(source, Path(path).expanduser(), split, names)
        except MissingSplit as error:
            missing = error
    if not found:
        raise missing
    return found


def split_named(path: Path) -> str | None:
    """The split named in a file's name, by any of the usual names; None if it names none.

    Example:
        >>> split_named(Path("totto_dev_data.jsonl")), split_named(Path("validation-00000-of-00001.parquet"))
        ('validation', 'validation')
    """
    words = _words(path)
    return next((part for part, names in NAMES.items() if words & set(names)), None)


def by_number(path: Path) -> list[tuple[str, int]]:
    """A sort key that puts 2.json before 10.json."""
    return [(text, int(number or -1)) for text, number in re.findall("([^0-9]*)([0-9]*)", str(path))]


def plain_stem(path: Path) -> str:
    """A file's name without what tells its format. Example: plain_stem(Path("rows.v1.jsonl.gz")) -> 'rows.v1'"""
    name = path.name
    while Path(name).suffix.lower() in (*SUFFIXES, *PACKED, ".xml", ".txt"):
        name = Path(name).stem
    return name


def is_data(path: Path, suffixes: Sequence[str] = SUFFIXES) -> bool:
    """True for the name of a file that may hold rows."""
    return kind_of(path) in suffixes and not NO_ROWS.fullmatch(path.name)


def _at(source: Source, path: Path, split: str, names: Sequence[str]) -> list[Path]:
    """The files of a split at one path."""
    if "{split}" in str(path):
        patterns = [str(path).replace("{split}", name) for name in names]
        for pattern in patterns:
            if found := _matching(pattern):
                return found
        raise source.missing(split, f"there is no file {_either(patterns)}")
    if path.is_dir():
        return _in_folder(source, path, split, names)
    files = _matching(str(path))
    if not files:
        if path.exists():
            with readable(path):
                open_regular(path).close()  # says what it is instead
        raise LmgymError(f"task.path: there is no file or folder {path}{_inside(path) or nearby(path)}")
    named = source.named or files != [path]
    holds = {
        file: split if named and _words(file) & set(names) else (split_named(file) if named else None) or "train"
        for file in files
    }
    own = [file for file in files if holds[file] == split or (holds[file] == "train" and "train" in names)]
    if not own:
        others = _either(sorted(set(holds.values())))
        raise source.missing(split, f"{path} holds {others}; give the folder of both files as task.path")
    return own


def _matching(pattern: str) -> list[Path]:
    """The file of this name, or the files that match the pattern."""
    if exists(Path(pattern)) and not pattern.lower().endswith(ARCHIVES):
        return [Path(pattern)]
    if not glob.has_magic(pattern):
        return []
    return sorted((path for one in glob.glob(pattern, recursive=True) if (path := Path(one)).is_file()), key=by_number)


def _inside(path: Path) -> str:
    """What an archive holds, where a path names it and no member that it has."""
    found = (path, "") if path.name.lower().endswith(ARCHIVES) and path.is_file() else archive_of(path)
    return f"; {found[0]} holds {', '.join(members(found[0])[:20])}" if found is not None else ""


def _in_folder(source: Source, folder: Path, split: str, names: Sequence[str]) -> list[Path]:
    """`files_of` for a folder."""
    places = [folder / source.config] if source.config and (folder / source.config).is_dir() else []
    places += [folder, folder / "data"]
    for place in places:
        # A subfolder of the split's name comes first.
        for name in names:
            below = sorted((file for file in (place / name).rglob("*") if _is_file(file, source)), key=by_number)
            if below:
                return below
        # Else files with the split in their names.
        files = sorted((file for file in place.glob("*") if _is_file(file, source)), key=by_number)
        if own := [file for file in files if _words(file) & set(names)]:
            return _one_data_set(own, folder, split, names, source.suffixes)
        if files and "train" in names and not any(split_named(file) for file in files):
            return [file for file in files if kind_of(file) == min(map(kind_of, files), key=source.suffixes.index)]
    subsets = sorted({file.parent.name for file in folder.glob("*/*") if _is_file(file, source)} - {"data"})
    hint = f"; it holds {', '.join(subsets)}: name one as task.config" if subsets and not source.config else ""
    raise source.missing(
        split,
        f"in {folder} there is no file whose name holds {_either(names)} and ends in {_either(source.suffixes)}{hint}",
    )


def _one_data_set(
    files: list[Path], folder: Path, split: str, names: Sequence[str], suffixes: Sequence[str]
) -> list[Path]:
    """Of files with a split in their names: one file, or all shards of one, of the first of the suffixes. What is
    called by the split alone comes before names that hold more."""
    first = min(map(kind_of, files), key=suffixes.index)
    sets: dict[str, list[Path]] = {}
    for file in files:
        if kind_of(file) == first:
            sets.setdefault(SHARD.sub("", plain_stem(file)), []).append(file)
    exact = [stem for stem in sets if stem.lower() in names] or [
        stem for stem in sets if stem.lower().endswith(tuple(f"-{name}" for name in names))
    ]
    chosen = exact if len(exact) == 1 else list(sets)
    if len(chosen) > 1:
        listed = ", ".join(file.name for stem in chosen for file in sets[stem][:1])
        raise LmgymError(
            f"task.path: {folder} holds several files for split '{split}': {listed}; name one of them, give a list or "
            f"a pattern with {{split}}, or write task.splits: {{{split}: {chosen[0]}}}"
        )
    return sets[chosen[0]]


def _is_file(path: Path, source: Source) -> bool:
    return is_data(path, source.suffixes) and path.is_file()


def _words(path: Path) -> set[str]:
    """The words of a file's name, its parts between dots and hyphens, and the whole name before its first dot."""
    name = path.name.lower()
    return {*re.split("[^a-z]+", name), *re.split("[-.]", name), name.split(".")[0]}


def _either(words: Sequence[Any]) -> str:
    return " or ".join([", ".join(map(str, words[:-1])), str(words[-1])] if len(words) > 1 else map(str, words))
