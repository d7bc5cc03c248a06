"""Callbacks: what they are told, what they add to a run's records, and that they leave it as it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.training.callbacks import Callback, EvaluationEnd, StepEnd
from tests import runs
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

HERE = __name__
HEARD: list[Any] = []


class Largest(Callback):
    """The largest advantage of the batch, and of all steps so far."""

    def __init__(self, sign: float = 1.0) -> None:
        self.sign, self.ever = sign, 0.0

    def on_step(self, end: StepEnd) -> Mapping[str, float]:
        HEARD.append(("step", end.stage, end.step, len(end.episodes), end.record["gradient_norm"] > 0))
        largest = self.sign * end.batch.require("advantages")[end.batch.actions].abs().max()
        self.ever = max(self.ever, float(largest))
        return {"advantage/largest": largest, "advantage/ever": self.ever}  # type: ignore[dict-item]  # or a tensor

    def on_evaluation(self, end: EvaluationEnd) -> None:
        HEARD.append(("evaluation", end.step, end.split, len(end.episodes), "reward" in end.record))

    def on_save(self, folder: Path) -> None:
        HEARD.append(("save", folder.name, (folder / "model.safetensors").is_file()))

    def state_dict(self) -> dict[str, Any]:
        return {"ever": self.ever}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ever = state["ever"]


class Raises(Callback):
    def __init__(self, where: str) -> None:
        self.where = where

    def on_step(self, end: StepEnd) -> Mapping[str, Any] | None:
        if self.where == "step":
            raise ZeroDivisionError("by nothing")
        answers: dict[str, Any] = {
            "taken": {"reward": 1.0},
            "text": {"a": "b"},
            "nan": {"a": float("nan")},
            "list": [1],
            "number": {3: 1.0},
        }
        return answers.get(self.where)

    def on_evaluation(self, end: EvaluationEnd) -> None:
        if self.where == "evaluation":
            raise KeyError("missing")

    def on_save(self, folder: Path) -> None:
        if self.where == "save":
            raise OSError("full")

    def state_dict(self) -> dict[str, Any]:
        return {"set": {1}} if self.where == "state" else {}


def trained(folder: Path) -> list[dict[str, Any]]:
    return [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]


def test_it_is_told_of_steps_evaluations_and_checkpoints(tmp_path: Path) -> None:
    HEARD.clear()
    folder = runs.run(tmp_path / "run", callbacks={f"{HERE}:Largest": None}, steps=4)
    assert [one[:4] for one in HEARD if one[0] == "step"] == [("step", "train", step, 16) for step in range(4)]
    assert [one[:4] for one in HEARD if one[0] == "evaluation"] == [
        ("evaluation", step, "test", 8) for step in (0, 3, 4)
    ]
    saved = [one[1] for one in HEARD if one[0] == "save"]
    assert saved == ["stage-0-step-000004"] and all(one[-1] for one in HEARD)
    found = [record["advantage/largest"] for record in trained(folder)]
    assert all(value > 0 for value in found)
    assert [record["advantage/ever"] for record in trained(folder)] == [max(found[: n + 1]) for n in range(4)]


def test_a_run_with_callbacks_is_the_run_without_them_and_resumes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"callbacks": {f"{HERE}:Largest": {"sign": 2.0}}, "steps": 4}
    plain = runs.run(tmp_path / "plain", steps=4)
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), **changes)
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    assert (plain / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("step", "in step 1 raised ZeroDivisionError: by nothing"),
        ("evaluation", "in the evaluation after step 0 raised KeyError"),
        ("save", "at the checkpoint stage-0-step-000001 raised OSError: full"),
        ("state", r"state_dict\(\) must be plain JSON, and raised TypeError"),
        ("taken", "the step's record has a 'reward' already"),
        ("text", "'a' raised|'a' is a str; return a number"),
        ("nan", "'a' is nan; return a finite number"),
        ("list", "on_step returned a list"),
        ("number", "a number's name is 3; make it a text"),
    ],
)
def test_one_that_fails_is_named(where: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=rf"callbacks: '{HERE}:Raises'.*{said}"):
        runs.run(tmp_path / "run", callbacks={f"{HERE}:Raises": {"where": where}}, steps=1)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({f"{HERE}:Missing": None}, "has no 'Missing'"),
        ({f"{HERE}:trained": None}, "is no subclass of lmgym.Callback"),
        ({f"{HERE}:Largest": 3}, "stand its arguments"),
        ({f"{HERE}:Largest": {"size": 1}}, "unexpected keyword argument 'size'"),
        ({"Largest": None}, "write module:attribute"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_folder_is_made(
    section: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(LmgymError, match=rf"callbacks: .*{said}"):
        runs.run(tmp_path / "run", callbacks=section)
    assert not (tmp_path / "run").exists()
