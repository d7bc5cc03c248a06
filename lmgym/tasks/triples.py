"""Sets of triples to be put into words: DART (Nan et al. 2021, arXiv 2007.02871), WebNLG (Gardent et al. 2017)."""

from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.tasks.base import check_split
from lmgym.tasks.files import SUFFIXES
from lmgym.tasks.sources import disjoint, stream_rows, texts_of
from lmgym.types import Example

Triple = list[str]  # head, relation, tail
TEMPLATE = "<H> {head} <R> {relation} <T> {tail}"
FIELDS = ("head", "relation", "tail")
SETS = {"dart": "tripleset", "web_nlg": "modified_triple_sets"}  # columns, as the Hub has them
WORDS = {"dart": "annotations", "web_nlg": "lex"}


@register("task", "dart")
def dart(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "Yale-LILY/dart@refs/convert/parquet",
    template: str = TEMPLATE,
    separator: str = " ",
) -> list[Example]:
    """The triples as prompt, all texts about them as references: 30,526 to train on, 2,768 to validate, 5,097 to test.

    Each triple is put into `template`, with {head}, {relation} and {tail} in it; between them stands `separator`.
    `meta` has table, the triples, for the reward `parent`, and sources, where each reference is from. Of train and
    validation, prompts that a later split has are left out.

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
    """As `dart`, of Wikipedia's facts; `meta` has table and category ("Airport", ...).

    `path` is a folder of the original's files, train/1triples/Airport.xml and so on (all that lie in train, dev and
    test are read), a pattern with {split}, or one such file; or rows as on the Hub or in GEM. `version` is the Hub's
    name of the release, and is not looked at where there is a path.

    Example:
        >>> load_task("web_nlg", "train", path="webnlg/release_v3.0/en", template="{head} | {relation} | {tail}",
        ...     separator=" && ")[0].prompt
        'Aarhus_Airport | cityServed | "Aarhus, Denmark"'
    """
    return _verbalise("web_nlg", split, (path, hub_id, version), template, separator)


def _verbalise(
    task: str, split: str, source: tuple[str | Path | None, str, str | None], template: str, separator: str
) -> list[Example]:
    check_split(task, split)
    _check_template(template)

    def examples_of(part: str) -> Iterator[Example]:
        path, hub_id, config = source
        rows = stream_rows(task, part, path, hub_id, config, suffixes=(*SUFFIXES, ".xml"))
        for index, (where, row) in enumerate(rows):
            triples = _triples(row, where, SETS[task])
            texts, name, meta = _texts(row, where)
            if not name and part != "test":
                raise LmgymError(f"{where}: there is no column '{WORDS[task]}'; {suggest(WORDS[task], row)}")
            references = texts_of(texts, where, name) if part != "test" or texts else ()
            prompt = separator.join(template.format(**dict(zip(FIELDS, triple, strict=True))) for triple in triples)
            if isinstance(row.get("category"), str):
                meta["category"] = row["category"]
            yield Example(f"{task}/{part}/{index}", prompt, references, {"table": triples, **meta})

    return disjoint(split, examples_of)


def _triples(row: dict[str, Any], where: str, usual: str) -> list[Triple]:
    name = next((name for name in ("tripleset", "modified_triple_sets", "input") if name in row), None)
    if name is None:
        raise LmgymError(f"{where}: there is no column '{usual}'; {suggest(usual, row)}")
    found = row[name]
    if isinstance(found, dict):  # WebNLG on the Hub: several sets are several wordings of one
        found = (found.get("mtriple_set") or [None])[0]
    if isinstance(found, list):
        found = [triple.split(" | ") if isinstance(triple, str) else triple for triple in found]
    if not isinstance(found, list) or not found or not all(_is_triple(triple) for triple in found):
        raise LmgymError(f"{where}: column '{name}' must hold triples [head, relation, tail], got {row[name]!r}")
    return [[str(part) for part in triple] for triple in found]


def _is_triple(triple: Any) -> bool:
    return isinstance(triple, list) and len(triple) == 3 and all(isinstance(part, str) and part for part in triple)


def _texts(row: dict[str, Any], where: str) -> tuple[list[Any], str, dict[str, Any]]:
    """The texts of a row, the column that they are from ("" where there is none), and what `meta` is to say of them."""
    annotations = row.get("annotations")
    if isinstance(annotations, dict):  # lists in place of a list of objects
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
    found = values.get(key, [])
    if not isinstance(found, list):
        raise LmgymError(f"{where}: column '{name}' must hold a list of texts, got {found!r}")
    return found


def _check_template(template: str) -> None:
    try:
        named = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise LmgymError(f"task.template: {error} in {template!r}; write {{{{ for a brace of the text") from error
    for name in FIELDS:
        if name not in named:
            raise LmgymError(f"task.template must hold {{head}}, {{relation}} and {{tail}}, got {template!r}")
    for name in named:
        if name not in FIELDS:
            raise LmgymError(f"task.template: unknown field '{{{name}}}'; {suggest(name, FIELDS)}")
