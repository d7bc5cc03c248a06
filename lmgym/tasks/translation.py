"""Translation: `wmt14`, `wmt16`, `iwslt2017`, `multi30k`, and `parallel` for any text in two languages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import SPLITS
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column
from lmgym.tasks.rows.find import NAMES, Source, files_of
from lmgym.tasks.rows.formats import SUFFIXES
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.rows.unpacked import lines_of
from lmgym.tasks.sources import check_sizes, disjoint
from lmgym.types import Example

NEWS = "Helsinki-NLP/news_commentary"
TEXTS = (*SUFFIXES, ".txt")


@dataclass(frozen=True)
class _Source:
    """The source of a task's sentence pairs."""

    task: str
    source_language: str
    target_language: str
    path: str | Path | None
    hub_id: str
    config: str | None
    target_path: str | Path | None = None
    names: Mapping[str, Sequence[str]] | None = None
    train_hub_id: str | None = None


@register("task", "parallel")
def parallel(
    split: str,
    source_language: str = "en",
    target_language: str = "de",
    path: str | Path | None = None,
    target_path: str | Path | None = None,
    hub_id: str | None = None,
    config: str | None = None,
    splits: Mapping[str, str] | None = None,
    max_size: int | None = None,
    skip_blank: bool = False,
) -> list[Example]:
    """Any text in two languages: the prompt is a sentence, the reference its translation.

    The data is two text files with one sentence per line: a `path` with {language} ("data/{split}.{language}"; .gz
    works too), or `path` and `target_path`. Or it is rows {"translation": {"en": "...", "de": "..."}} or {"en": "...",
    "de": "..."}: a folder, a pattern with {split} or a file (.parquet, .jsonl, .json, .csv, .tsv), or, without `path`,
    the Hub's `hub_id` and `config`. `splits` gives unusual names of splits: {"test": "newstest2014"}.

    A pair with a blank side raises LmgymError; with `skip_blank` it is left out. `max_size` reads only the first so
    many pairs. Sentences of test are removed from validation, and sentences of both from train. Add the instruction
    ("translate English to German: ") with the option prompt_prefix. `meta` has source_language and target_language.

    Example:
        >>> load_task("parallel", "train", path="src-{split}.txt", target_path="tgt-{split}.txt",
        ...     prompt_prefix="translate English to German: ")
    """
    if (path is None) == (hub_id is None):
        raise LmgymError("task 'parallel' needs either task.path or task.hub_id")
    for name in splits or {}:
        if name not in SPLITS:
            raise LmgymError(f"task.splits names '{name}'; {suggest(name, SPLITS)}")
    names = {**NAMES, **{part: (name,) for part, name in (splits or {}).items()}}
    source = _Source("parallel", source_language, target_language, path, hub_id or "", config, target_path, names)
    return _translate(split, source, max_size, skip_blank)


@register("task", "wmt16")
def wmt16(
    split: str,
    source_language: str = "en",
    target_language: str = "de",
    path: str | Path | None = None,
    hub_id: str = "wmt/wmt16",
    news_only: bool = False,
    max_size: int | None = None,
    skip_blank: bool = False,
) -> list[Example]:
    """WMT16's news; see `parallel`. German-English: 4,548,885 pairs for training, 2,169 for validation, 2,999 for test.

    `news_only` trains on News Commentary instead (RL4LMs' `wmt16newsonly`; from the Hub only).

    Example:
        >>> load_task("wmt16", "train", max_size=100_000, prompt_prefix="translate English to German: ")
    """
    if news_only and path is not None:
        raise LmgymError("task.news_only reads the Hub; with a path of your own leave it out")
    train = NEWS if news_only else None
    config = _wmt_pair(source_language, target_language)
    source = _Source("wmt16", source_language, target_language, path, hub_id, config, train_hub_id=train)
    return _translate(split, source, max_size, skip_blank)


@register("task", "wmt14")
def wmt14(
    split: str,
    source_language: str = "en",
    target_language: str = "de",
    path: str | Path | None = None,
    hub_id: str = "wmt/wmt14",
    max_size: int | None = None,
    skip_blank: bool = False,
) -> list[Example]:
    """WMT14's news; see `parallel`. German-English: 4,508,785 pairs for training, 3,000 for validation, 3,003 for test.

    For a cleaned copy (such as RL4LMs' `wmt14_processed_en_de`) set `hub_id`, or `path` to its files.

    Example:
        >>> load_task("wmt14", "test", path="wmt14/{split}.{language}", prompt_prefix="translate English to German: ")
    """
    config = _wmt_pair(source_language, target_language)
    source = _Source("wmt14", source_language, target_language, path, hub_id, config)
    return _translate(split, source, max_size, skip_blank)


@register("task", "iwslt2017")
def iwslt2017(
    split: str,
    source_language: str = "en",
    target_language: str = "de",
    path: str | Path | None = None,
    hub_id: str = "IWSLT/iwslt2017@refs/convert/parquet",
    max_size: int | None = None,
    skip_blank: bool = False,
) -> list[Example]:
    """TED talks; see `parallel`. English-German: 206,112 pairs for training, 888 for validation, 8,079 for test.

    Example:
        >>> load_task("iwslt2017", "train", prompt_prefix="translate English to German: ")
    """
    config = f"iwslt2017-{_wmt_pair(source_language, target_language)}"
    source = _Source("iwslt2017", source_language, target_language, path, hub_id, config)
    return _translate(split, source, max_size, skip_blank)


@register("task", "multi30k")
def multi30k(
    split: str,
    source_language: str = "en",
    target_language: str = "de",
    path: str | Path | None = None,
    hub_id: str = "bentrevett/multi30k",
    test_set: str = "test_2016_flickr",
    skip_blank: bool = False,
) -> list[Example]:
    """Image captions (Elliott et al. 2016); see `parallel`. 29,000 pairs for training (minus captions that occur in the
    other splits), 1,014 for validation, 1,000 for test.

    `path` is a folder with the original's train.en.gz, train.de.gz, val.en.gz, ... (or unpacked), or with rows as on
    the Hub; `test_set` is one of the original's test sets. The Hub has only English and German, and only
    test_2016_flickr.

    Example:
        >>> load_task("multi30k", "test", path="multi30k/data/task1/raw", test_set="test_2017_flickr")
    """
    if path is None and test_set != "test_2016_flickr":
        raise LmgymError(f"task.test_set: '{test_set}' is not on the Hub; set task.path to the original's folder")
    names = {**NAMES, "test": (test_set, "test") if test_set == "test_2016_flickr" else (test_set,)}
    where = path
    if path is not None and Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
        endings = [ending for ending in (".gz", "") if any(folder.glob(f"*.{source_language}{ending}"))]
        where = folder / f"{{split}}.{{language}}{endings[0]}" if endings else folder
    source = _Source("multi30k", source_language, target_language, where, hub_id, None, names=names)
    return _translate(split, source, None, skip_blank)


def _wmt_pair(source: str, target: str) -> str:
    """The Hub's name of a language pair: English last, for both directions."""
    first, last = (target, source) if source == "en" else (source, target)
    return f"{first}-{last}"


def _translate(split: str, source: _Source, max_size: int | None, skip_blank: bool) -> list[Example]:
    """The examples of a split, for all translation tasks."""
    if source.source_language == source.target_language:
        raise LmgymError(f"task.target_language must differ from task.source_language, '{source.source_language}'")
    check_sizes(max_size=max_size)
    languages = {"source_language": source.source_language, "target_language": source.target_language}

    def examples_of(part: str) -> Iterator[Example]:
        def example(index: int, row: Row) -> Example | None:
            where, pair = row[0], _pair(source, row)
            blank = next((side for side in (0, 1) if not isinstance(pair[side], str) or not pair[side].strip()), None)
            if blank is None:
                return Example(f"{source.task}/{part}/{index}", pair[0], (pair[1],), dict(languages))
            if skip_blank:
                return None
            language = (source.source_language, source.target_language)[blank]
            raise LmgymError(
                f"{where}: the sentence in '{language}' must be a text, got {pair[blank]!r}; task.skip_blank "
                "leaves such pairs out"
            )

        return fitting(islice(_rows(source, part), max_size if part == split else None), example)

    return disjoint(source.task, split, examples_of)


def _rows(source: _Source, part: str) -> Iterator[Row]:
    """The rows of a split, each with a pair."""
    names = source.names or NAMES
    if source.path is not None and ("{language}" in str(source.path) or source.target_path is not None):
        return _aligned(source, part, names)
    hub_id = source.train_hub_id if part == "train" and source.train_hub_id else source.hub_id
    return load_rows(source.task, part, source.path, hub_id, source.config, names=names)


def _pair(source: _Source, row: Row) -> tuple[Any, Any]:
    """The sentence of a row and its translation."""
    where, values = row
    pair = values.get("translation", values)
    if not isinstance(pair, dict):
        raise LmgymError(f"{where}: column 'translation' must hold an object of sentences, got {pair!r}")
    if pair is values and not {source.source_language, source.target_language} & values.keys():
        raise LmgymError(f"{where}: there is neither a column 'translation' nor '{source.source_language}'")
    return column(pair, source.source_language, where), column(pair, source.target_language, where)


def _aligned(source: _Source, part: str, names: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """The pairs of two text files, whose lines belong together."""
    files = []
    for language, own in ((source.source_language, source.path), (source.target_language, source.target_path)):
        path = Path(str(own or source.path).replace("{language}", language)).expanduser()
        files.append(files_of(Source(source.task, path, names=names, suffixes=TEXTS), part)[0])
    for one, other in zip_longest(*map(lines_of, files)):
        if one is None or other is None:
            raise LmgymError(f"{(one or other)[0]}: there is no such line in {files[0] if one is None else files[1]}")
        sentence, translation = one[1].strip(), other[1].strip()
        pair = {source.source_language: sentence, source.target_language: translation}
        yield other[0] if sentence and not translation else one[0], pair
