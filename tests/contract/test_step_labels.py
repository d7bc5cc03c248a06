"""The task `step_labels`: the forms of its rows, its splits, and one sentence for what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.tasks.base import MissingSplit, check_task, load_task
from lmgym.types import Example, LabelledStep

STEPS = (LabelledStep("2+2=4", True), LabelledStep("4+1=6", False))


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only(path: Path, **arguments: Any) -> Example:
    [example] = load_task("step_labels", "train", path=str(path), test=0.0, **arguments)
    return example


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": ({"prompt": "2+2+1=", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}, {}),
    "numbers": ({"prompt": "2+2+1=", "completions": ["2+2=4", "4+1=6"], "labels": [1, 0.0]}, {}),
    "messages": (
        {
            "prompt": [{"role": "user", "content": "2+2+1="}],
            "completions": [{"role": "assistant", "content": "2+2=4"}, {"role": "assistant", "content": "4+1=6"}],
            "labels": [True, False],
        },
        {},
    ),
    "other names": (
        {"question": "2+2+1=", "steps": ["2+2=4", "4+1=6"], "right": [True, False]},
        {"prompt": "question", "completions": "steps", "labels": "right"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(form: str, tmp_path: Path) -> None:
    row, arguments = FORMS[form]
    example = only(written(tmp_path / "steps.jsonl", {**row, "source": "web"}), **arguments)
    assert example.prompt == next(iter(row.values())) and example.meta == {"source": "web"}
    assert example.steps == STEPS and Example.from_json(json.loads(json.dumps(example.to_json()))) == example


def row(**changes: Any) -> dict[str, Any]:
    return {"prompt": "2+2+1=", "completions": ["2+2=4", "4+1=6"], "labels": [True, False], **changes}


WRONG: list[tuple[Any, str]] = [
    ({"prompt": "2+2=", "labels": [True]}, "there is no column 'completions'"),
    ({"prompt": "2+2=", "completions": ["4"]}, "there is no column 'labels'"),
    (row(completions=[]), r"column 'completions' must hold a list of steps, got \[\]"),
    (
        row(completions=[{"role": "assistant", "content": "I add.", "tool_calls": [{}]}], labels=[True]),
        r"step 1 in column 'completions' calls tools \(tool_calls\)",
    ),
    (row(completions="2+2=4"), "column 'completions' must hold a list of steps, got '2"),
    (row(labels=[True]), "column 'labels' must hold a label for each of the 2 steps, got 1 labels"),
    (row(labels=True), "column 'labels' must hold a label for each of the 2 steps, got True"),
    (row(labels=[True, "+"]), r"label 2 in column 'labels' must be true or false \(or 1 or 0\), got '\+'"),
    (row(labels=[True, -1]), "label 2 in column 'labels' must be true or false .*, got -1"),
    (row(labels=[None, True]), "label 1 in column 'labels' must be true or false .*, got None"),
    (row(completions=["2+2=4", " \n"]), "step 2 in column 'completions' is empty"),
    (row(completions=["2+2=4", 7]), "step 2 in column 'completions' must be a text or a message of the assistant"),
    (
        row(completions=["2+2=4", {"role": "user", "content": "4+1=6"}]),
        "step 2 in column 'completions' must be a message of the assistant, not of 'user'",
    ),
    (row(prompt=""), "column 'prompt' must hold a text or a list of chat messages"),
    (row(prompt=[{"role": "assistant", "content": "2+2"}]), "the last message in column 'prompt' must be the user's"),
]


@pytest.mark.parametrize(("row", "said"), WRONG, ids=[said[:60] for _, said in WRONG])
def test_rows_that_do_not_fit_name_their_line(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", FORMS["texts"][0], row)
    with pytest.raises(LmgymError, match=said) as caught:
        only(path)
    assert str(caught.value).startswith(f"{path}:2: ") and "\n" not in str(caught.value)


def test_splits(tmp_path: Path) -> None:
    """All answers to one prompt are in one split."""
    rows = [row(prompt=f"{n // 2}+1=", n=n) for n in range(200)]
    path = str(written(tmp_path / "steps.jsonl", *rows))
    check_task("step_labels", path=path, validation=0.2)
    own = {part: load_task("step_labels", part, path=path, validation=0.2) for part in ("train", "validation", "test")}
    prompts = {part: {str(example.prompt) for example in examples} for part, examples in own.items()}
    assert sum(map(len, own.values())) == 200 and sum(map(len, prompts.values())) == 100
    with pytest.raises(MissingSplit, match=r"set task\.validation above 0"):
        load_task("step_labels", "validation", path=path)
    with pytest.raises(LmgymError, match=r"needs task\.path"):
        load_task("step_labels", "train")
    with pytest.raises(LmgymError, match=r"task\.splits\.test: "):
        load_task("step_labels", "test", path=path, splits={"test": "tset"})
