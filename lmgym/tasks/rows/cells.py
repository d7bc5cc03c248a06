"""What is made of a row's columns: prompts, references and texts, by names, dotted paths, templates or functions."""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError, describe, represent
from lmgym.core.registry import suggest
from lmgym.core.validation import check_arguments
from lmgym.tasks.rows.messages import Prompt, as_prompt
from lmgym.types import RecipeText


def column(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of a column, or, by a dotted path, inside of one: "reward_model.ground_truth", "messages.-1.content",
    "messages.:-1" (all but the last). Raises LmgymError if the row does not have it; `where` is "PATH:LINE" for the
    message."""
    if name in row:
        return row[name]
    value: Any = row
    steps = name.split(".")
    for place, step in enumerate(steps):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and re.fullmatch("-?[0-9]{1,9}", step) and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, list) and (ends := re.fullmatch("(-?[0-9]{1,9})?:(-?[0-9]{1,9})?", step)):
            value = value[slice(*(None if end is None else int(end) for end in ends.groups()))]
        elif place == 0:
            raise LmgymError(f"{where}: there is no column '{name}'; {suggest(step, row)}")
        else:
            inside = suggest(step, value) if isinstance(value, Mapping) else f"there is {represent(value)}"
            raise LmgymError(f"{where}: column '{'.'.join(steps[:place])}' holds no '{step}'; {inside}")
    return value


def fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """A template with the row's columns in place of their names in braces. Only the template's own words may make
    control tokens.

    Example: fill("{Body} {Question}", {"Body": "I have 2 pens.", "Question": "How many?"}, "") ->
        'I have 2 pens. How many?'"""
    texts: list[str] = []
    for words, name in _pieces(template):
        if words:
            texts.append(words)
        if name is not None:
            texts.append(_as_text(column(row, name, where), name, where))
    return RecipeText.join(*texts)


@lru_cache
def _pieces(template: str) -> tuple[tuple[RecipeText, str | None], ...]:
    """The template's own words, each with the column that follows them. Kept, since a data set fills one often."""
    return tuple((RecipeText(words), name) for words, name, _, _ in Formatter().parse(template))


def fields_of(template: str, key: str) -> list[tuple[str, str | None, str | None]]:
    """The fields of a template, each in braces: name, format and conversion. Raises LmgymError, which names the `key`,
    if braces do not match."""
    try:
        return [(name, form, by) for _, name, form, by in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise LmgymError(f"{key}: {error} in {template!r}; write {{{{ for a brace of the text") from error


def check_fields(names: Sequence[str], valid: Sequence[str]) -> None:
    """Raise LmgymError for a field of task.template that is not one of the `valid`."""
    for name in names:
        if name not in valid:
            raise LmgymError(f"task.template: unknown field '{{{name}}}'; {suggest(name, valid)}")


def check_template(template: str, key: str) -> None:
    """Raise LmgymError, naming the key, for a template that cannot be filled."""
    for name, form, conversion in fields_of(template, key):
        if not name or form or conversion:
            raise LmgymError(f"{key}: braces hold the name of a column, as {{question}}, in {template!r}")


@dataclass(frozen=True)
class Cell:
    """How a value is made of a row: a section {column, pattern} or {function}, a template, or a name.

    Example: Cell.of({"column": "answer", "pattern": "#### (.*)"}, "task.references")"""

    column: str | None = None
    pattern: re.Pattern[str] | None = None
    template: str | None = None
    function: Callable[[Mapping[str, Any]], Any] | None = None
    name: str = ""
    """What it is called in messages."""

    @classmethod
    def of(cls, given: Any, key: str) -> "Cell":
        """The cell that a recipe's key asks for. Raises LmgymError if it cannot be one."""
        if isinstance(given, str):
            if "{" not in given:
                return cls(column=given, name=given)
            check_template(given, key)
            return cls(template=given, name=given)
        if not isinstance(given, Mapping):
            raise LmgymError(f"key '{key}' must be the name of a column, a template or a section, not {given!r}")
        section = check_arguments(_section, given, key, given=0)
        if (section.get("column") is None) == (section.get("function") is None):
            raise LmgymError(f"key '{key}' needs either a column (and a pattern), or a function of a row")
        if section.get("function") is not None:
            return cls(function=registry.get("row", section["function"]), name=key)
        try:
            pattern = None if section.get("pattern") is None else re.compile(section["pattern"], re.DOTALL)
        except re.error as error:
            raise LmgymError(f"{key}.pattern: {error} in {section['pattern']!r}") from error
        return cls(column=section["column"], pattern=pattern, name=section["column"])

    def value(self, row: Mapping[str, Any], where: str) -> Any:
        """The value of a row. Raises LmgymError, with `where`, if it has none."""
        if self.function is not None:
            try:
                return self.function(row)
            except Exception as error:
                raise LmgymError(f"{where}: the function of {self.name} raised {describe(error)}") from error
        if self.template is not None:
            return fill(self.template, row, where)
        value = column(row, self.column or "", where)
        if self.pattern is None:
            return value
        found = self.pattern.search(value) if isinstance(value, str) else None
        if found is None:
            raise LmgymError(
                f"{where}: column '{self.name}' holds no {self.pattern.pattern!r} (pattern), got {represent(value)}"
            )
        return next((text for text in found.groups() if text is not None), found[0]).strip()


def _section(column: str | None = None, pattern: str | None = None, function: str | None = None) -> None:
    """The keys of a cell's section."""


def prompt_of(row: Mapping[str, Any], name: str, where: str) -> Prompt:
    """The prompt in a column of a row, as `as_prompt` reads it."""
    return as_prompt(column(row, name, where), name, where)


def references_of(row: Mapping[str, Any], cell: Cell | None, where: str) -> tuple[str, ...]:
    """The references of a row: a text, a number or a list of these; none where the usual column is missing, or holds
    null or NaN, as pandas writes a missing value. Raises LmgymError, with `where`, for anything else."""
    if cell is None:
        return ()
    if cell.column == "references" and "references" not in row:
        near = difflib.get_close_matches("references", row, n=1, cutoff=0.8)
        if near:  # the default column is optional, but a spelling error must not lose all references
            raise LmgymError(
                f"{where}: there is no column 'references' but '{near[0]}': set task.references to it, or to null"
            )
        return ()
    value = cell.value(row, where)
    values = [] if _is_missing(value) else value if isinstance(value, list | tuple) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float) or _is_unbounded(item):
            told = f"{where}: column '{cell.name}' must hold a text, a number or a list of these, got {represent(item)}"
            if isinstance(value, bool) and cell.column:
                told += f'; as a text: task.references: "{{{cell.column}}}"'
            raise LmgymError(told)
    return tuple(map(str, values))


def text_of(row: tuple[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """The text in the first of the columns `names` that the row has. Raises LmgymError if it is empty or not a text."""
    where, values = row
    name = next((name for name in names if name in values), names[0])
    value = column(values, name, where)
    if not isinstance(value, str) or not value.strip():
        raise LmgymError(f"{where}: column '{name}' must hold a text, got {value!r}")
    return value


def _as_text(value: Any, name: str, where: str) -> str:
    """A column as a template writes it: a text or a number as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    if _is_missing(value):
        raise LmgymError(f"{where}: column '{name}' holds nothing, and a template needs it")
    try:
        as_it_is = isinstance(value, int | float) and not _is_unbounded(value)
        return str(value) if as_it_is else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LmgymError(f"{where}: column '{name}' must hold a text or numbers, got {represent(value)}") from error


def _is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_unbounded(value: Any) -> bool:
    """Whether a value is a number that is not finite: as a text it would be the word "inf" or "nan"."""
    return isinstance(value, float) and not math.isfinite(value)
