"""`totto`: ToTTo, write a sentence about the highlighted cells of a table (Parikh et al. 2020, arXiv 2004.14373)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column
from lmgym.tasks.rows.load import load_rows
from lmgym.tasks.rows.unfit import fitting
from lmgym.tasks.sources import check_sizes, disjoint, texts_of
from lmgym.types import Example

Cell = Mapping[str, Any]  # {"value", "is_header", "column_span", "row_span"}
Table = Sequence[Sequence[Cell]]
ANNOTATION = ("original_sentence", "sentence_after_deletion", "sentence_after_ambiguity", "final_sentence")


@register("task", "totto")
def totto(
    split: str,
    path: str | Path | None = None,
    hub_id: str = "google-research-datasets/totto@refs/convert/parquet",
    representation: Literal["subtable", "fulltable"] = "subtable",
    keep_table: bool = True,
    max_size: int | None = None,
) -> list[Example]:
    """The prompt is a linearised table, the references are the final sentences. 120,761 for training, 7,700 each for
    validation and test. Validation has three references each; those of test are not public, so test has none.

    representation "subtable": the highlighted cells with their headers; "fulltable": all cells, row by row, with the
    highlighted ones marked. The table occurs twice in the prompt, the second time after the titles of page and section
    (as in RL4LMs; see `linearised`).

    `meta` has raw_table (the original row, for the reward `parent`), and overlap_subset (true or false) if the row has
    it, which is in validation only. With raw_table, train needs several gigabytes of memory; `keep_table: false` leaves
    it out. `max_size` reads only the first so many rows. Tables of test are removed from validation, and tables of both
    from train.

    `path` is a folder with totto_train_data.jsonl, totto_dev_data.jsonl and unlabeled_totto_test_set.jsonl, a pattern
    with {split}, or one such file. Without `path` the data comes from the Hugging Face Hub.

    Example:
        >>> load_task("totto", "validation", path="totto_data")[0].prompt
        '<table> <cell> Reds <col_header> Team </col_header> </cell> </table><page_title> ... </table>'
    """
    check_sizes(max_size=max_size)

    def examples_of(part: str) -> Iterator[Example]:
        def example(index: int, place: Row) -> Example:
            where, raw = place
            row = _row(raw, where, part)
            prompt = linearised(row, full=representation == "fulltable")
            sentences = [one["final_sentence"] for one in row["sentence_annotations"]]
            references = texts_of(sentences, where, "sentence_annotations") if part != "test" or any(sentences) else ()
            meta = {"raw_table": row} if keep_table and part == split else {}
            if "overlap_subset" in row:
                meta["overlap_subset"] = row["overlap_subset"]
            return Example(f"totto/{part}/{index}", prompt, references, meta)

        rows = load_rows("totto", part, path, hub_id)
        return fitting(islice(rows, max_size if part == split else None), example)

    return disjoint("totto", split, examples_of)


def linearised(row: Mapping[str, Any], full: bool = False) -> str:
    """A row of ToTTo as one line of markup: the table, the titles, and the table again.

    Each cell is followed by its headers: column headers are the header cells in the rows above that share a column with
    it; row headers are the header cells before it in its row.

    Example, a table of two rows, Team and Reds, with the latter highlighted, on a page called Baseball:
        >>> linearised(row).split("</table>")
        ['<table> <cell> Reds <col_header> Team </col_header> </cell> ',
         '<page_title> Baseball </page_title> <table> <cell> Reds <col_header> Team </col_header> </cell> ', '']
    """
    table, headers = row["table"], _headers(row["table"])
    highlighted = [(cell[0], cell[1]) for cell in row["highlighted_cells"]]
    texts = [_marked("cell", headers[r], table[r], c) for r, c in highlighted]
    if full:
        marks = dict.fromkeys(highlighted, "highlighted_cell")
        rows = [
            [_marked(marks.get((r, c), "cell"), headers[r], cells, c) for c in range(len(cells))]
            for r, cells in enumerate(table)
        ]
        texts = [f"<row> {''.join(cells)}</row> " for cells in rows]
    body = f"<table> {''.join(texts)}</table>"
    named = {name: row[f"table_{name}"] for name in ("page_title", "section_title")}
    titles = "".join(f"<{name}> {title} </{name}> " for name, title in named.items() if title)
    return f"{body}{titles}{body}"


def _headers(table: Table) -> list[list[tuple[int, int, str]]]:
    """For each row the header cells above it: (first column, last column + 1, value)."""
    above: list[tuple[int, int, str]] = []
    by_row = []
    for cells in table:
        by_row.append(list(above))
        above += [(*_span(cells, c), cell["value"]) for c, cell in enumerate(cells) if cell["is_header"]]
    return by_row


def _span(cells: Sequence[Cell], index: int) -> tuple[int, int]:
    """The columns of a cell, which may span several: (first, last + 1)."""
    start = sum(cell["column_span"] for cell in cells[:index])
    return start, start + cells[index]["column_span"]


def _marked(mark: str, above: Sequence[tuple[int, int, str]], cells: Sequence[Cell], index: int) -> str:
    """A cell of a row, between two marks, with its headers; `above` are the header cells in the rows above."""
    start, end = _span(cells, index)
    of_column = [f"<col_header> {text} </col_header> " for first, last, text in above if first < end and last > start]
    of_row = [f"<row_header> {cell['value']} </row_header> " for cell in cells[:index] if cell["is_header"]]
    return f"<{mark}> {cells[index]['value']} {''.join([*of_column, *of_row])}</{mark}> "


def _row(row: dict[str, Any], where: str, part: str) -> dict[str, Any]:
    """The row, checked, in the original's form; on the Hub two columns have another form."""
    for name in ("table_page_title", "table_section_title"):
        if not isinstance(column(row, name, where), str):
            raise LmgymError(f"{where}: column '{name}' must hold a text, got {row[name]!r}")
    table = column(row, "table", where)
    if not isinstance(table, list) or not all(isinstance(cells, list) and all(map(_is_cell, cells)) for cells in table):
        raise LmgymError(
            f"{where}: column 'table' must hold rows of cells, each with value, is_header, column_span and row_span"
        )
    cells = column(row, "highlighted_cells", where)
    if not isinstance(cells, list) or not cells or not all(_is_position(cell, table) for cell in cells):
        raise LmgymError(f"{where}: column 'highlighted_cells' must hold [row, column] of cells, got {cells!r}")
    annotations = row.get("sentence_annotations", []) if part == "test" else column(row, "sentence_annotations", where)
    if isinstance(annotations, dict):  # the Hub has an object of lists instead of a list of objects
        names = [name for name in ANNOTATION if name in annotations]
        columns = [annotations[name] for name in names]
        lengths = {len(values) if isinstance(values, list) else -1 for values in columns}
        if len(lengths) > 1 or -1 in lengths:
            raise LmgymError(f"{where}: column 'sentence_annotations' must hold lists of one length, got {columns!r}")
        annotations = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(annotations, list) or not all(
        isinstance(one, dict) and "final_sentence" in one for one in annotations
    ):
        raise LmgymError(f"{where}: column 'sentence_annotations' must hold objects with a final_sentence")
    changed = {**row, "sentence_annotations": annotations}
    # The Hub writes the texts "True", "False" and "none".
    overlap = {"True": True, "False": False}.get(str(changed.pop("overlap_subset", None)))
    return changed if overlap is None else changed | {"overlap_subset": overlap}


def _is_cell(cell: Any) -> bool:
    kinds = {"value": str, "is_header": bool, "column_span": int}
    return isinstance(cell, dict) and all(isinstance(cell.get(name), kind) for name, kind in kinds.items())


def _is_position(cell: Any, table: Table) -> bool:
    numbers = isinstance(cell, list) and len(cell) == 2 and all(isinstance(number, int) for number in cell)
    return numbers and 0 <= cell[0] < len(table) and 0 <= cell[1] < len(table[cell[0]])
