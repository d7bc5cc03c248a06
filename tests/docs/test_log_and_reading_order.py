"""The log's index names every entry, and docs/reading_order.md counts the lines that are there."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| (\d+) \| \[[^]]+\]\(\.\./(\S+?)\) \| (\d+) \|", re.M)


@pytest.mark.parametrize("month", sorted((DOCS / "log").glob("*.md")), ids=lambda path: path.stem)
def test_the_index_of_the_log_names_every_entry(month: Path) -> None:
    index = (DOCS / "log.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+) (.*)$", month.read_text(encoding="utf-8"), re.M)
    missing = [title for day, title in entries if f"- {day} [{title}](log/{month.name}#" not in index]
    assert entries and not missing


def lines_of_code(text: str) -> int:
    """Lines with code: no blank lines, comments or docstrings.

    Example: lines_of_code('\"\"\"What.\"\"\"\\n\\nx = 1  # one\\n') -> 1
    """
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_reading_order_counts_the_lines_that_are_there() -> None:
    page = (DOCS / "reading_order.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    counted = {file: lines_of_code((DOCS.parent / file).read_text(encoding="utf-8")) for _, file, _ in rows}
    assert rows and [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert {file: int(said) for _, file, said in rows} == {file: round(count, -1) for file, count in counted.items()}
    promised = re.search(r"about ([\d,]+) lines of code", page)
    assert promised is not None
    assert sum(counted.values()) <= int(promised[1].replace(",", "")) * 1.05
