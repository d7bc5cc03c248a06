"""Triples to text. `dart`: DART (Nan et al. 2021, arXiv 2007.02871). `web_nlg`: WebNLG (Gardent et al. 2017)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import check_fields, fields_of
from lmgym.tasks.rows.formats import SUFFIXES
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import disjoint, texts_of
from lmgym.types import Example

Triple = list[str]  # head, relation, tail
TEMPLATE = "<H> {head} <R> {relation} <T> {tail}"
FIELDS = ("head", "relation", "tail")
SETS = {"dart": "tripleset", "web_nlg": "modified_triple_sets"}  # columns of the triples on the Hub
WORDS = {"dart": "annotations", "web_nlg": "lex"}  # columns of the texts on the Hub


@register("task", "dart")
def dart(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "Yale-LILY/dart@refs/convert/parquet",
    template: str = TEMPLATE,
    separator: str = " ",
) -> list[Example]:
    """The prompt is a set of triples, the references are all texts about it. 30,526 for training, 2,768 for validation,
    5,097 for test.

    Each triple is written with `template`, whose fields are {head}, {relation} and {tail}; triples are joined by
    `separator`. `meta` has table (the triples, for the reward `parent`) and sources (the source of each reference).
    Prompts of test are removed from validation, and prompts of both from train.

    `path` is a folder of the original's dart-v1.1.1-full-train.json, -dev.json and -test.json or .xml, a pattern with
    {split}, or one such file; rows as in GEM ("target", "references") are read too. Without `path` the data comes from
    the Hugging Face Hub.

    Example:
        >>> load_task("dart", "validation", path="dart")[0].prompt
        '<H> Mars Hill College <R> JOINED <T> 1973 <H> Mars Hill College <R> LOCATION <T> Mars Hill, North Carolina'
    """
    return _verbalise("dart", split, (path, hub_id, None), template, separator)


@register("task", "web_nlg")
def web_nlg(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "webnlg-challenge/web_nlg@refs/convert/parquet",
    version: str = "release_v3.0_en",
    template: str = TEMPLATE,
    separator: str = " ",
) -> list[Example]:
    """As `dart`, with facts from Wikipedia; `meta` has table and category ("Airport", ...).

    `path` is a folder with the original's files, train/1triples/Airport.xml and so on (all files in train, dev and test
    are read), a pattern with {split}, or one such file; or rows as on the Hub or in GEM. `version` is the Hub's name of
    the release; with a `path` it is ignored.

    Example:
        >>> load_task("web_nlg", "train", path="webnlg/release_v3.0/en", template="{head} | {relation} | {tail}",
        ...     separator=" && ")[0].prompt
        'Aarhus_Airport | cityServed | "Aarhus, Denmark"'
    """
    return _verbalise("web_nlg", split, (path, hub_id, version), template, separator)


def _verbalise(
    task: str, split: str, source: tuple[str | Path | None, str, str | None], template: str, separator: str
) -> list[Example]:
    """The examples of a split, for both tasks."""
    named = [name for name, _, _ in fields_of(template, "task.template")]
    if not {*FIELDS} <= {*named}:
        raise LmgymError(f"task.template must hold {{head}}, {{relation}} and {{tail}}, got {template!r}")
    check_fields(named, FIELDS)

    def examples_of(part: str) -> Iterator[Example]:
        path, hub_id, config = source

        def example(index: int, place: Row) -> Example:
            where, row = place
            triples = _triples(row, where, SETS[task])
            texts, name, meta = _texts(row, where)
            if not name and part != "test":
                raise LmgymError(f"{where}: there is no column '{WORDS[task]}'; {suggest(WORDS[task], row)}")
            references = texts_of(texts, where, name) if part != "test" or texts else ()
            prompt = separator.join(template.format(**dict(zip(FIELDS, triple, strict=True))) for triple in triples)
            if isinstance(row.get("category"), str):
                meta["category"] = row["category"]
            return Example(f"{task}/{part}/{index}", prompt, references, {"table": triples, **meta})

        return fitting(load_rows(task, part, path, hub_id, config, suffixes=(*SUFFIXES, ".xml")), example)

    return disjoint(task, split, examples_of)


def _triples(row: dict[str, Any], where: str, usual: str) -> list[Triple]:
    """The triples of a row, in any of the known formats; the error names the `usual` column."""
    name = next((name for name in ("tripleset", "modified_triple_sets", "input") if name in row), None)
    if name is None:
        raise LmgymError(f"{where}: there is no column '{usual}'; {suggest(usual, row)}")
    triples = row[name]
    if isinstance(triples, dict):  # WebNLG on the Hub: its sets are different wordings of the same triples
        sets = triples.get("mtriple_set")
        triples = sets[0] if isinstance(sets, list) and sets else None
    if isinstance(triples, list):
        triples = [triple.split(" | ") if isinstance(triple, str) else triple for triple in triples]
    if not isinstance(triples, list) or not triples or not all(_is_triple(triple) for triple in triples):
        raise LmgymError(f"{where}: column '{name}' must hold triples [head, relation, tail], got {row[name]!r}")
    return [[str(part) for part in triple] for triple in triples]


def _is_triple(triple: Any) -> bool:
    return isinstance(triple, list) and len(triple) == 3 and all(isinstance(part, str) and part for part in triple)


def _texts(row: dict[str, Any], where: str) -> tuple[list[Any], str, dict[str, Any]]:
    """The texts of a row, the name of their column ("" if the row has none), and their entries of `meta`."""
    annotations = row.get("annotations")
    if isinstance(annotations, dict):  # an object of lists instead of a list of objects
        sources = _list(annotations, "source", "annotations.source", where)
        return _list(annotations, "text", "annotations.text", where), "annotations", {"sources": sources}
    if isinstance(annotations, list):
        objects = [one if isinstance(one, dict) else {} for one in annotations]
        sources = [one["source"] for one in objects if "source" in one]
        return [one.get("text") for one in objects], "annotations", {"sources": sources} if sources else {}
    if isinstance(row.get("lex"), dict):
        return _list(row["lex"], "text", "lex.text", where), "lex", {}
    if row.get("references"):
        return _list(row, "references", "references", where), "references", {}
    if row.get("target"):
        return [row["target"]], "target", {}
    return [], next((name for name in ("annotations", "lex", "references", "target") if name in row), ""), {}


def _list(values: dict[str, Any], key: str, name: str, where: str) -> list[Any]:
    """The list in a column; empty if the column is missing."""
    texts = values.get(key, [])
    if not isinstance(texts, list):
        raise LmgymError(f"{where}: column '{name}' must hold a list of texts, got {texts!r}")
    return texts
