"""How a row becomes an example: which columns its prompt, its references and its id are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import Cell, check_template, column, fields_of, fill, references_of
from lmgym.tasks.rows.formats import place_of
from lmgym.tasks.rows.messages import as_prompt, with_tools
from lmgym.tasks.rows.pictures import RowPictures
from lmgym.types import Example, RecipeText, pictures_of


@dataclass(frozen=True)
class Reader:
    """The keys of a recipe that say it.
    Example: Reader.of("question", "answer", None, {}).example(row, {"rows.jsonl": "rows"}).id -> "rows/1\""""

    prompt: Cell | list[dict[str, str]]
    references: Cell | None
    id: str | None
    columns: Mapping[str, str]
    tools: str | None = None
    pictures: RowPictures = field(default_factory=RowPictures)

    @classmethod
    def of(
        cls,
        prompt: Any,
        references: Any,
        id: str | None,
        columns: Mapping[str, str],
        tools: str | None = None,
        pictures: RowPictures | None = None,
    ) -> "Reader":
        """The reader of a recipe's keys. Raises LmgymError for what they cannot mean."""
        for message in prompt if isinstance(prompt, list) else ():
            if {*message} != {"role", "content"}:
                raise LmgymError(f"key 'task.prompt': a message has a role and a content, got {represent(message)}")
            check_template(message["content"], "task.prompt")
        prompt = prompt if isinstance(prompt, list) else Cell.of(prompt, "task.prompt")
        right = None if references is None else Cell.of(references, "task.references")
        return cls(prompt, right, id, columns, tools, pictures or RowPictures())

    def prompt_of(self, row: Row) -> Any:
        """The prompt of a row, a text or messages. Raises LmgymError if it has none."""
        where, values = row
        # 1. A template may name the column of pictures.
        shown, column = self.pictures.shown(values, where), self.pictures.column(values)
        filling = {**values, column: RecipeText.join(*shown)} if column is not None and shown else values
        value: Any
        if isinstance(self.prompt, list):
            name, value = "task.prompt", [{**m, "content": fill(m["content"], filling, where)} for m in self.prompt]
            told = [message["content"] for message in value]
        else:
            templated = self.prompt.template is not None
            name, value = self.prompt.name, self.prompt.value(filling if templated else values, where)
            told = [value] if templated else []
        # 2. Else the data says where they stand.
        shown = [] if any(map(pictures_of, told)) else shown
        put = partial(self.pictures.put_into, shown=shown, name=name, where=where)
        return as_prompt(value, name, where, continued=True, shown=put)

    def example(self, row: Row, stems: Mapping[str, str], prompt: Any = None) -> Example:
        """The example of a row; `stems` are how ids begin, by file, and `prompt` is `prompt_of` the row where that is
        known. Raises LmgymError, with file and line, if it cannot be one."""
        where, values = row
        prompt = with_tools(self.prompt_of(row) if prompt is None else prompt, values, self.tools, where)
        references = references_of(values, self.references, where)
        used = {"references", self.id, None if isinstance(self.prompt, list) else self.prompt.column}
        used.add(self.pictures.column(values))
        meta = {key: value for key, value in values.items() if key not in used}
        meta |= {name: column(values, path, where) for name, path in self.columns.items()}
        return Example(self._id(row, stems), prompt, references, meta)

    def columns_of_prompt(self) -> list[str] | None:
        """The columns that a prompt is made of; None: any."""
        if isinstance(self.prompt, Cell) and self.prompt.function is not None:
            return None
        cells = [self.prompt] if isinstance(self.prompt, Cell) else [Cell(template=m["content"]) for m in self.prompt]
        names = [name for cell in cells for name, _, _ in fields_of(cell.template or "", "task.prompt")]
        names += [cell.column for cell in cells if cell.column is not None]
        return [*names, *(name.partition(".")[0] for name in names), *self.pictures.columns]

    def _id(self, row: Row, stems: Mapping[str, str]) -> str:
        where, values = row
        if self.id is None:
            file, number = place_of(where)
            return f"{stems[file]}/{number}"
        value = column(values, self.id, where)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise LmgymError(
                f"{where}: column '{self.id}' must hold a text or a whole number as id, got {represent(value)}"
            )
        return str(value)
