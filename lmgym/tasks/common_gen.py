"""`common_gen`: CommonGen, write a sentence with three to five given concepts (Lin et al. 2020, arXiv 1911.03705)."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, prompt_writer
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column
from lmgym.tasks.rows.find import Source, files_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.rows.unpacked import lines_of
from lmgym.tasks.sources import disjoint, texts_of
from lmgym.types import Example

CONCEPTS = ".src_alpha.txt"  # endings of the original's two text files
SENTENCES = ".tgt.txt"


def _around(concepts: str, arguments: Mapping[str, Any]) -> str:
    """The prompt of concepts that are joined already."""
    return f"{arguments['prefix']}{concepts}{arguments['end']}"


@register("task", "common_gen")
@prompt_writer(_around)
def common_gen(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "allenai/common_gen",
    prefix: str = "summarize: ",
    separator: str = " ",
    end: str = " ",
) -> list[Example]:
    """The prompt is `prefix`, the concepts joined by `separator`, and `end`; all sentences are references.

    `meta` has the list of concepts. All sentences for the same concepts in the same order are references of one example
    (RL4LMs makes an example of each; GEM groups validation only). The sentences of test are not public, so its examples
    have no references (RL4LMs: "empty reference").

    Source of the defaults of `prefix`, `separator` and `end`: RL4LMs, `commongen`; its recipes have "generate a
    sentence with: ", " " and ".".

    `path` is a folder of the original's files commongen.train.src_alpha.txt and .tgt.txt, line by line, or
    commongen.train.jsonl with {"concept_set": "dog_N#run_V", "scene": [...]} (dev for validation, test); a pattern
    with {split}; or one such file. Without `path` the data comes from the Hugging Face Hub.

    Example:
        >>> load_task("common_gen", "validation", path="commongen", prefix="use these words: ", end=".")[0].prompt
        'use these words: field stand look.'
    """

    def examples_of(part: str) -> list[Example]:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for concepts, sentences in _read(part, path, hub_id):
            grouped.setdefault(concepts, []).extend(sentences)
        prompts = [f"{prefix}{separator.join(concepts)}{end}" for concepts in grouped]
        return [
            Example(f"common_gen/{part}/{index}", prompt, tuple(sentences), {"concepts": list(concepts)})
            for index, (prompt, (concepts, sentences)) in enumerate(zip(prompts, grouped.items(), strict=True))
        ]

    return disjoint("common_gen", split, examples_of)


def _read(part: str, path: str | Path | None, hub_id: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The concepts and sentences of each row."""
    file = None if path is None else _concepts_file(part, Path(path).expanduser())
    if file is not None:
        yield from fitting(_aligned(file, part), _of_lines)
        return
    rows = load_rows("common_gen", part, path, hub_id)
    yield from fitting(rows, lambda _, row: (_concepts(row[1], row[0]), _sentences(row[1], row[0], part)))


def _concepts_file(part: str, path: Path) -> Path | None:
    """The original's file of concepts at this path, if there is one."""
    if path.is_dir():
        return next((file for file in sorted(path.glob(f"*{CONCEPTS}")) if _holds(part, file)), None)
    return files_of(Source("common_gen", path), part)[0] if path.suffix == ".txt" else None


def _holds(part: str, file: Path) -> bool:
    try:
        return bool(files_of(Source("common_gen", file), part))
    except MissingSplit:
        return False


def _of_lines(_: int, row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    where, lines = row
    concepts = _split(lines["concepts"], where)
    return concepts, texts_of([lines["sentence"][1]], lines["sentence"][0], "sentence") if lines["sentence"] else ()


def _aligned(file: Path, part: str) -> Iterator[Row]:
    """The rows of the original's two files, whose lines belong together. Test may have no file of sentences."""
    sentences = file.with_name(file.name.replace(CONCEPTS, SENTENCES))
    if not file.name.endswith(CONCEPTS):
        raise LmgymError(f"task.path: a file of lines must be named NAME{CONCEPTS}, with NAME{SENTENCES}, not {file}")
    if part == "test" and not sentences.is_file():
        for where, line in lines_of(file):
            yield where, {"concepts": line, "sentence": None}
        return
    for above, below in zip_longest(lines_of(file), lines_of(sentences)):
        if above is None or below is None:
            raise LmgymError(f"{(above or below)[0]}: the line has no other in {file if above is None else sentences}")
        yield above[0], {"concepts": above[1], "sentence": below}


def _split(line: str, where: str) -> tuple[str, ...]:
    if not line.split():
        raise LmgymError(f"{where}: the line must hold concepts, as 'dog run field', got {line!r}")
    return tuple(line.split())


def _concepts(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """The concepts of a row: "concept_set": "dog_N#run_V" in the original, "concepts": [...] on the Hub."""
    if "concept_set" in row:
        text = row["concept_set"]
        found = [word.rpartition("_")[0] or word for word in text.split("#")] if isinstance(text, str) else None
    else:
        found = column(row, "concepts", where)
    if not isinstance(found, list) or not found or not all(isinstance(word, str) and word.strip() for word in found):
        name = "concept_set" if "concept_set" in row else "concepts"
        raise LmgymError(f"{where}: column '{name}' must hold concepts, got {row[name]!r}")
    return tuple(found)


def _sentences(row: dict[str, Any], where: str, part: str) -> tuple[str, ...]:
    name = next((name for name in ("scene", "references", "target") if row.get(name)), None)
    if name is None:
        if part == "test":
            return ()
        column(row, "scene" if "concept_set" in row else "target", where)
        raise LmgymError(f"{where}: the row must hold a sentence, in column 'scene', 'references' or 'target'")
    return texts_of(row[name] if isinstance(row[name], list) else [row[name]], where, name)
