"""`data` (or by its old name `jsonl`): any rows as prompts."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import SPLITS, MissingSplit, check_split, hash_fraction
from lmgym.tasks.prompt_forms import own_texts
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.find import NAMES, Paths, Source, plain_stem
from lmgym.tasks.rows.formats import place_of
from lmgym.tasks.rows.indexed import IndexedRows
from lmgym.tasks.rows.load import Found, find_split
from lmgym.tasks.rows.pictures import RowPictures
from lmgym.tasks.rows.reader import Reader
from lmgym.tasks.rows.unfit import dropping, fitting, tell, told_elsewhere, unreadable
from lmgym.tasks.sources import check_shares
from lmgym.tasks.streamed import StreamedExamples
from lmgym.types import Example, told_apart


@register("task", "jsonl")
@register("task", "data")
@own_texts
def data(
    split: str,
    path: str | list[str] | Path | None = None,
    hub_id: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    data_files: Any = None,
    splits: dict[str, str] | None = None,
    prompt: str | list[dict[str, str]] | dict[str, str] = "prompt",
    references: str | dict[str, str] | None = "references",
    id: str | None = None,
    columns: dict[str, str] | None = None,
    tools: str | None = "tools",
    images: str | None = "images",
    image_folder: str | Path | None = None,
    test_path: str | list[str] | Path | None = None,
    validation_path: str | list[str] | Path | None = None,
    validation: float = 0.0,
    test: float = 0.1,
    streaming: bool | None = None,
) -> Sequence[Example]:
    """Each row of any data becomes an Example: of files (.parquet, .arrow, .jsonl, .json, .csv, .tsv, also .gz, .xz or
    .zst), or of a data set of the Hugging Face Hub.

    `path` is a file, a folder (a clone of a data set, what `save_to_disk` wrote, the library's cache), a pattern
    ("data/{split}-*.parquet"), a member of an archive ("rows.zip/train.jsonl"), or a list of these, all of whose rows
    count. Without it, `hub_id` with `config`, `revision` and `data_files` as in the datasets library.

    `prompt`, `references` and `id` are columns, also inside of others ("extra_info.question", "messages.0.content"). A
    prompt is a text, or chat messages in OpenAI's or ShareGPT's form; or a template ("{Body} {Question}"), or messages
    with such templates. References are a text, a number, a list of these, or missing (`references: null`: none); or a
    template, or {column: answer, pattern: "#### (.*)"}, or {function: "module:function"} of the row. All columns but
    prompt, `references` and id go to `meta` as they stand in the file, and so do `columns`, under new names: {solution:
    reward_model.ground_truth}. Without `id`, the id is made of file and row. The column `tools`, if there is one, holds
    JSON schemas that the chat template writes into the prompt (`tools: null`: a column like others).

    Pictures stand in the column `images` (without it, in `image`), or in parts of messages: files below `image_folder`
    (by default the folder of the rows), data: addresses, base64, or bytes as the datasets library has them. Nothing is
    fetched. rows/pictures.py says where each stands in the prompt; `images: null`: a column like others.

    Splits: `splits` names those of the data, or parts of them: {train: "train_prefs[:5%]", test: test_prefs}.
    `test_path` and `validation_path` are the data of these splits. A split that the data does not have is taken out of
    train: the shares `validation` and `test`, by a hash of the prompt. So rows may be added or reordered, and equal
    prompts are never in two splits. A single file, whatever its name, is what train is taken of.

    With `streaming` the rows stay in their files, and each is read when it is asked for (tasks/streamed.py); without
    the key, large files do. An error in a row behind the first ones then ends the run when the row's turn comes,
    unless splits are taken out of train, for which every row is read at the beginning. `id` needs all rows in memory.
    Raises LmgymError with file and line for data that cannot be read.

    Example, the SVAMP data set in its original format, and GSM8K as verl prepares it:
        >>> load_task("data", "train", path="SVAMP.json", prompt="{Body} {Question}", references="Answer", id="ID")
        >>> load_task("data", "train", path="gsm8k/train.parquet", references="reward_model.ground_truth")
    """
    own, shares = {"test": test_path, "validation": validation_path}, {"test": test, "validation": validation}
    check_split("data", split)
    _check_keys(path, hub_id, splits or {}, id, streaming, shares)
    source = Source("data", path, hub_id or "", config, revision, data_files, splits or {}, named=False)
    reader = Reader.of(prompt, references, id, columns or {}, tools, RowPictures.of(images, image_folder))
    return _Data(source, own, reader, shares, False if id is not None else streaming).examples(split)


def _check_keys(
    path: Any,
    hub_id: str | None,
    splits: Mapping[str, str],
    id: str | None,
    streaming: bool | None,
    shares: Mapping[str, float],
) -> None:
    """Raise LmgymError for keys that are missing, unknown, out of bounds, or do not go together."""
    check_shares(**shares)
    if path is not None and hub_id is not None:
        raise LmgymError("task.path and task.hub_id are both given; write one of them")
    if path is None and hub_id is None:
        raise LmgymError("key 'task.path' is missing; 'task' needs it, or task.hub_id")
    for name in splits:
        if name not in SPLITS:
            raise LmgymError(f"task.splits names '{name}'; {suggest(name, SPLITS)}")
    if streaming and id is not None:
        raise LmgymError("task.id cannot be checked for ids that come twice with task.streaming; remove one of them")


_fractions_of: dict[tuple[tuple[str, ...], str], np.ndarray] = {}  # of the newest files, by what it depends on


@dataclass(frozen=True)
class _Data:
    """The data of a task, and how its splits are made."""

    source: Source
    own: Mapping[str, Paths | None]
    """Paths of splits that have their own."""
    reader: Reader
    shares: Mapping[str, float]
    """Of train, for the splits that the data does not have."""
    streaming: bool | None

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of a split, as a list or where they lie."""
        patterned = "{split}" in str(self.source.path)  # it says where each split is
        if split != "train" and (own := self._own(split, needed=patterned)) is not None:
            return self._all(own, split, f"/{split}", None, ("test",) if split == "validation" else ())
        if split != "train" and not self.shares[split]:
            raise MissingSplit(f"task 'data' has no split '{split}': set task.{split}_path, or task.{split} above 0")
        found = find_split(self.source, "train")
        path = self.source.path or ""
        given = [path] if isinstance(path, str | Path) else path
        exact = found.paths == [Path(path).expanduser() for path in given]
        test, validation = (
            0.0 if patterned or self._own(part) is not None else self.shares[part] for part in ("test", "validation")
        )
        ends = [test, test + validation]  # of these shares, among hashes in [0, 1)
        below = "" if exact else "/train"
        return self._all(found, split, below, ends if any(ends) else None, ("test", "validation"))

    def _own(self, split: str, needed: bool = False) -> Found | None:
        """The data of a split that has its own; None if it is to be taken out of train. Raises MissingSplit if it is
        named, or `needed`, and is not there."""
        try:
            path = self.own[split]
            if path is None:
                return find_split(self.source, split)
            each = [path] if isinstance(path, str | Path) or not path else path
            found = [self._named(one, split) for one in each]
            return replace(found[0], files=[one for part in found for one in part.files])
        except MissingSplit:
            if needed or split in self.source.splits or self.own[split] is not None:
                raise
            return None

    def _named(self, path: Paths, split: str) -> Found:
        """The data at a path that the recipe names for a split: the files of that name, else those of train, else of
        any other, whose names do not count then."""
        missing = list[MissingSplit]()
        for names in (NAMES[split], NAMES["train"], [name for known in NAMES.values() for name in known]):
            try:
                return find_split(replace(self.source, path=path, splits={}, names={split: names}), split)
            except MissingSplit as error:
                missing.append(error)
        raise missing[0]

    def _all(
        self, found: Found, split: str, below: str, ends: list[float] | None, others: Sequence[str]
    ) -> Sequence[Example]:
        """The examples of what was found, or those whose prompts are the split's. In memory without the prompts of
        `others`, splits that have data of their own."""
        stems = {file: stem + below for file, stem in _stems(found).items()}
        if self._stays(found):
            return self._streamed(found, split, stems, ends)
        places, held_out, twice = dict[str, str](), self._held_out(found, others), 0

        def make(number: int, row: Row) -> tuple[float, Example] | None:
            nonlocal twice
            prompt = self.reader.prompt_of(row)
            # Without its tools: rows that differ in these only are in one split.
            if (told := told_apart(prompt)) in held_out:
                twice += 1
                return None
            example = self.reader.example(row, stems, prompt)
            if (first := places.setdefault(example.id, row[0])) != row[0]:
                line = place_of(first)[1]
                raise LmgymError(f"{row[0]}: the id '{example.id}' is that of line {line} already; ids must be unique")
            return (0.0 if ends is None else hash_fraction(told)), example

        made = list(fitting(found.rows(), make))
        if twice and not made:
            raise LmgymError(
                f"task 'data': each of the {twice:,} prompts of split '{split}' is in another split's own data too; "
                "give other data to one of them, or the same path to both"
            )
        if twice:
            tell(f"rows that are left out, since another split's own data holds their prompts too: {twice:,}")
        if ends is None:
            return [example for _, example in made]
        return [made[place][1] for place in self._shared(split, ends, [fraction for fraction, _ in made])]

    def _stays(self, found: Found) -> bool:
        """True if the rows stay in their files."""
        return bool(self.streaming or (self.streaming is None and found.large))

    def _held_out(self, found: Found, others: Sequence[str]) -> set[str]:
        """The prompts of the `others` that have data of their own. Left out is data that is named for this split too,
        which is meant, and data that stays in its files."""
        prompts = set[str]()
        for own in map(self._own, others):
            if own is not None and not self._stays(own) and not own.same_rows(found):
                with told_elsewhere():
                    prompts.update(fitting(own.rows(), lambda _, row: told_apart(self.reader.prompt_of(row))))
        return prompts

    def _streamed(
        self, found: Found, split: str, stems: Mapping[str, str], ends: list[float] | None
    ) -> StreamedExamples:
        """`_all` where the rows stay in their files. They are read now only if it depends on them which ones count."""
        files, numbers = found.indexed()
        chosen = None if numbers is None else array("q", numbers)
        read = partial(self.reader.example, stems=stems)
        if ends is not None or dropping():
            fractions = self._fractions(files, read)
            among = np.arange(len(fractions)) if chosen is None else np.asarray(chosen)
            among = among[fractions[among] <= 1]
            among = among if ends is None else among[self._shared(split, ends, fractions[among])]
            chosen = array("q", among.astype(np.int64).tobytes())
        return StreamedExamples(files, read, chosen, asked=bool(self.streaming))

    def _fractions(self, files: Sequence[IndexedRows], read: Callable[..., Example]) -> np.ndarray:
        """The hash of each row's prompt, in [0, 1); 2 for rows that do not fit. Two splits of a run ask for it."""
        key = (tuple(file.sha256 for file in files), repr((self.reader.prompt, self.reader.pictures)))
        if key in _fractions_of and not dropping():
            return _fractions_of[key]
        only = None if dropping() else self.reader.columns_of_prompt()
        fractions, first = np.full(sum(map(len, files)), 2.0), 0
        for file in files:
            for index, row in file.rows(only):
                try:
                    prompt = self.reader.prompt_of(row)
                    if dropping():
                        read(row, prompt=prompt)  # raises for a row that does not fit
                    fractions[first + index] = hash_fraction(told_apart(prompt))
                except LmgymError as error:
                    unreadable(row[0], error)
            first += len(file)
        if (fractions <= 1).all():
            _fractions_of.clear()
            _fractions_of[key] = fractions
        return fractions

    def _shared(self, split: str, ends: list[float], fractions: Sequence[float] | np.ndarray) -> np.ndarray:
        """The places of the split's examples, by the hashes of their prompts. Raises LmgymError if it gets none."""
        parts = np.searchsorted(ends, fractions, side="right")
        counts = dict(zip(("test", "validation", "train"), np.bincount(parts, minlength=3).tolist(), strict=True))
        if len(parts) and not counts[split]:
            rows = ", ".join(f"{part} {counts[part]:,}" for part in SPLITS)
            remedy = (
                f"raise task.{split} ({self.shares[split]:g}), or give the split a path of its own, task.{split}_path"
                if split != "train"
                else "lower task.test or task.validation"
            )
            raise LmgymError(
                f"task 'data' has no examples in split '{split}': a hash of the prompts shares {len(parts):,} rows out "
                f"(rows: {rows}); {remedy}"
            )
        return np.flatnonzero(parts == list(counts).index(split))


def _stems(found: Found) -> dict[str, str]:
    """How the ids of a file's rows begin: its name without endings, and its number before it where names are equal."""
    if found.table is not None:
        return {found.source.hub_id: found.source.hub_id}
    stems = [plain_stem(path) for path in found.paths]
    if len({*stems}) < len({*found.paths}):
        stems = [f"{number}-{stem}" for number, stem in enumerate(stems)]
    return dict(zip(map(str, found.paths), stems, strict=True))
