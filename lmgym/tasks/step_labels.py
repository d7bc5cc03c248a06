"""`step_labels`: answers in steps, of which people or a program have said which are right."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.core.registry import register
from lmgym.tasks.prompt_forms import own_texts
from lmgym.tasks.rows import Row
from lmgym.tasks.rows.cells import column, prompt_of
from lmgym.tasks.rows.find import Source
from lmgym.tasks.sources import of_own_data
from lmgym.types import Example, LabelledStep


@register("task", "step_labels")
@own_texts
def step_labels(
    split: str,
    path: str | list[str] | Path | None = None,
    hub_id: str | None = None,
    config: str | None = None,
    prompt: str = "prompt",
    completions: str = "completions",
    labels: str = "labels",
    splits: dict[str, str] | None = None,
    validation: float = 0.0,
    test: float = 0.1,
) -> list[Example]:
    """Answers in labelled steps from a file, a folder or the Hugging Face Hub, in TRL's form of "stepwise supervision",
    as in trl-lib/math_shepherd and trl-lib/prm800k: {"prompt", "completions", "labels"}, one answer a row. The rest of
    the arguments are column names.

    `completions` are the steps, texts or assistant messages, and `labels` one for each: true (or 1) for a right step,
    false (or 0) for a wrong one. The prompt is a text or a list of messages that ends with the user's. White space
    around a step does not count. All other columns go to `meta`.

    `path` is a file, a pattern with {split}, or a folder (.parquet, .jsonl, .json, .csv). The shares `validation` and
    `test` of the training prompts, by a hash, are the splits that the data does not have itself; all answers to one
    prompt are in one split.

    Raises LmgymError with file and line for a row without steps, an empty step, more or fewer labels than steps, a
    label that is neither true nor false, and wrong roles.

    Example:
        >>> load_task("step_labels", "train", path="steps.jsonl")[0].steps
        (LabelledStep(text='2+2=4', right=True), LabelledStep(text='4+1=6', right=False))
    """
    source = Source("step_labels", path, hub_id or "", config, splits=splits or {})
    return of_own_data(source, split, partial(_example, (prompt, completions, labels)), validation, test)


def _example(names: tuple[str, str, str], row: Row, id: str) -> Example:
    (where, values), (prompt, completions, labels) = row, names
    meta = {key: value for key, value in values.items() if key not in names}
    return Example(id, prompt_of(values, prompt, where), meta=meta, steps=_steps(values, completions, labels, where))


def _steps(row: Mapping[str, Any], completions: str, labels: str, where: str) -> tuple[LabelledStep, ...]:
    """The steps of a row with their labels."""
    texts, marks = column(row, completions, where), column(row, labels, where)
    if not isinstance(texts, list) or not texts:
        raise LmgymError(f"{where}: column '{completions}' must hold a list of steps, got {represent(texts)}")
    if not isinstance(marks, list) or len(marks) != len(texts):
        count = f"{len(marks)} labels" if isinstance(marks, list) else represent(marks)
        raise LmgymError(
            f"{where}: column '{labels}' must hold a label for each of the {len(texts)} steps, got {count}"
        )
    return tuple(
        LabelledStep(_text(text, number, completions, where), _right(mark, number, labels, where))
        for number, (text, mark) in enumerate(zip(texts, marks, strict=True), start=1)
    )


def _text(step: Any, number: int, name: str, where: str) -> str:
    """The text of a step, of an assistant message its content."""
    place = f"{where}: step {number} in column '{name}'"
    if isinstance(step, dict):
        if step.get("role") != "assistant":
            raise LmgymError(f"{place} must be a message of the assistant, not of {represent(step.get('role'))}")
        if step.get("tool_calls"):
            raise LmgymError(f"{place} calls tools (tool_calls), and only a text can be learned; write it as a text")
        step = step.get("content")
    if not isinstance(step, str):
        raise LmgymError(f"{place} must be a text or a message of the assistant, got {represent(step)}")
    if not step.strip():
        raise LmgymError(f"{place} is empty")
    return step


def _right(mark: Any, number: int, name: str, where: str) -> bool:
    if not isinstance(mark, int | float) or mark not in (0, 1):
        raise LmgymError(
            f"{where}: label {number} in column '{name}' must be true or false (or 1 or 0), got {represent(mark)}"
        )
    return bool(mark)
