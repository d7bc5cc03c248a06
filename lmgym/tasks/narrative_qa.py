"""`narrative_qa`: NarrativeQA, questions about a summary of a book or film (Kočiský et al. 2018, arXiv 1712.07040)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import MissingSplit, prompt_writer
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column, text_of
from lmgym.tasks.rows.find import NAMES
from lmgym.tasks.rows.formats import rows_of
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import disjoint, texts_of
from lmgym.types import Example

UNIFIED = ("prompt", "answer")  # the columns of UnifiedQA's .tsv files, which have no header line
Question = tuple[str, str, tuple[str, ...], dict[str, Any]]  # question, summary, answers, meta


def _in_lower_case(prompt: str, arguments: Mapping[str, Any]) -> str:
    """The prompt of a question, the separator and a summary, in one text."""
    return prompt.lower() if arguments["lowercase"] else prompt


@register("task", "narrative_qa")
@prompt_writer(_in_lower_case)
def narrative_qa(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "deepmind/narrativeqa",
    separator: str = " \\n ",
    lowercase: bool = True,
) -> list[Example]:
    """The prompt is the question, `separator` and the summary; the references are the two answers; all in lower case.
    32,747 questions for training, 3,461 for validation, 10,557 for test.

    The default separator is UnifiedQA's: a space, a backslash, the letter n, a space. Rows with equal prompts become
    one example with all their answers. `lowercase: false` keeps capital letters. `meta` has document_id, if the data
    has it. Apostrophes are kept (as in RL4LMs and UnifiedQA).

    `path` is the original's folder with qaps.csv, and summaries.csv next to it or in third_party/wikipedia (columns
    question, answer1, answer2 and summary, or the same with _tokenized); or a folder with UnifiedQA's train.tsv,
    dev.tsv and test.tsv (prompt, tab, answer), a pattern with {split}, or one such file. Without `path` the data comes
    from the Hugging Face Hub, where each row holds the whole book: several gigabytes.

    Example:
        >>> load_task("narrative_qa", "validation", path="narrativeqa")[0].references
        ('the actor wearing the black cloak', 'the actor in the black cloak')
    """
    place = None if path is None else Path(path).expanduser()
    has_csv = place is not None and place.is_dir() and any(place.glob("qaps*.csv"))

    def examples_of(part: str) -> list[Example]:
        questions = _from_csv(part, place) if has_csv and place else _from_rows(part, path, hub_id)
        grouped: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for question, summary, answers, meta in questions:
            prompt = f"{question}{separator}{summary}" if summary else question
            prompt = prompt.lower() if lowercase else prompt
            answers = tuple(answer.strip().lower() if lowercase else answer.strip() for answer in answers)
            grouped.setdefault(prompt, ([], meta))[0].extend(answers)
        return [
            Example(f"narrative_qa/{part}/{index}", prompt, tuple(answers), meta)
            for index, (prompt, (answers, meta)) in enumerate(grouped.items())
        ]

    return disjoint("narrative_qa", split, examples_of)


def _from_csv(part: str, folder: Path) -> Iterator[Question]:
    file = sorted(folder.glob("qaps*.csv"))[0]
    beside = [*sorted(folder.glob("summaries*.csv")), *sorted(folder.glob("third_party/wikipedia/summaries*.csv"))]
    if not beside:
        raise LmgymError(f"task.path: there is no summaries.csv in {folder} or in its folder third_party/wikipedia")
    summaries = dict(fitting(rows_of(beside[0]), lambda _, row: (text_of(row, ["document_id"]), _text(row, "summary"))))
    found = set[str]()

    def question(_: int, row: Row) -> Question | None:
        found.add(text_of(row, ["set"]))
        if text_of(row, ["set"]) not in NAMES[part]:
            return None
        document = text_of(row, ["document_id"])
        if document not in summaries:
            raise LmgymError(f"{row[0]}: the document {document!r} has no summary in {beside[0]}")
        answers = (_text(row, "answer1"), _text(row, "answer2"))
        return _text(row, "question"), summaries[document], answers, {"document_id": document}

    yield from fitting(rows_of(file), question)
    if found.isdisjoint(NAMES[part]):
        raise MissingSplit(f"task 'narrative_qa' has no split '{part}': no row of {file} has it in its column 'set'")


def _text(row: Row, name: str) -> str:
    return text_of(row, [name, f"{name}_tokenized"])


def _from_rows(part: str, path: str | Path | None, hub_id: str) -> Iterator[Question]:
    suffixes = (".tsv", ".parquet", ".jsonl")
    rows = load_rows("narrative_qa", part, path, hub_id, suffixes=suffixes, columns=UNIFIED)
    return fitting(rows, lambda _, row: _question(row))


def _question(row: Row) -> Question:
    where, values = row
    if "document" not in values:  # UnifiedQA's prompt holds question and summary
        return text_of(row, ["prompt"]), "", (text_of(row, ["answer"]),), {}
    summary = _inside(values, "document", "summary", "text", where=where)
    question = _inside(values, "question", "text", where=where)
    answers = column(values, "answers", where)
    if not isinstance(answers, list) or not all(isinstance(one, dict) and "text" in one for one in answers):
        raise LmgymError(f"{where}: column 'answers' must hold objects with a text, got {answers!r}")
    (question,), (summary,) = texts_of([question], where, "question"), texts_of([summary], where, "document")
    found = texts_of([answer["text"] for answer in answers], where, "answers")
    return question, summary, found, {"document_id": values["document"].get("id")}


def _inside(values: dict[str, Any], *names: str, where: str) -> Any:
    """A value in nested objects: names ("document", "summary", "text") give document.summary.text."""
    value: Any = values
    for index, name in enumerate(names, start=1):
        if not isinstance(value, dict) or name not in value:
            raise LmgymError(f"{where}: there is no '{'.'.join(names[:index])}'; the row must hold {'.'.join(names)}")
        value = value[name]
    return value
