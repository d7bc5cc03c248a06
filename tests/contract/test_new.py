"""`lmgym new`: five questions, and a recipe that trains."""

import io
import json
import sys
from pathlib import Path

import pytest

from lmgym.cli.main import main
from lmgym.config.build import load_config
from lmgym.config.new_recipe import Draft, parameters_of
from lmgym.config.yaml import read_yaml
from lmgym.training.setup import load_data
from tests.runs import complaint
from tests.torture.new import dialogue

ROWS = [{"question": f"What is {a} + {b}?", "solution": f"#### {a + b}", "n": a} for a in range(9) for b in range(9)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{one}\n" for one in answers)))


@pytest.mark.slow
def test_the_answers_are_a_recipe_that_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "builtin:tiny", "rows.jsonl", "", "", "2")
    assert main(["new", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert all(f"{number}/5 " in said for number in range(1, 6))
    assert "question: What is 0 + 0?" in said and "[question,solution]" in said  # the columns, and what they may be
    assert "lmgym train mine.yaml" in said
    tree = read_yaml(Path("mine.yaml"))
    assert tree["task"] == {
        "name": "data", "path": "rows.jsonl", "prompt": "question", "references": "solution", "test": 0.2,
    }  # fmt: skip
    assert tree["rewards"] == {"final_answer": 1.0} and tree["policy"] == {"model": "builtin:tiny"}
    assert main(["check", "mine.yaml"]) in (0, 1)  # an untrained model never ends its answers
    assert "stage train: GRPO on data" in capsys.readouterr().out
    assert main(["train", "mine.yaml", "steps=1", "threads=1", "evaluation=null"]) == 0


def test_bad_answers_are_asked_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {
        "model": ["nowhere", "builtin:tinny", "."],
        "data": ["", "row.jsonl", "empty.jsonl"],
        "columns": ["questio", "question,", "question,solution,n"],
        "reward": ["final_anser", "regex", "nowhere:function"],
        "minutes": ["soon", "0", "-5", "inf", "nan"],
    }
    good = {"model": "builtin:tiny", "data": "rows.jsonl", "columns": "question", "reward": "words", "minutes": "5"}
    Path("empty.jsonl").touch()
    answer(monkeypatch, *(word for key in good for word in (*bad[key], good[key])))
    assert main(["new", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    for sentence in (
        "there is no model nowhere; name a folder, or a Hub id",
        "there is no model builtin:tinny; did you mean 'builtin:tiny'?",
        ". is a folder without a config.json",
        "this one has no default",
        "there is no file or folder row.jsonl; did you mean rows.jsonl?",
        "there is no column 'questio'; did you mean 'question'?",
        "name the prompt's column, and behind a comma the answer's",
        "unknown reward 'final_anser'; did you mean 'final_answer'?",
        "key 'rewards.regex.pattern' is missing",
        "there is no module 'nowhere'",
        "soon is no number of minutes; write one above 0",
    ):
        assert sentence in said
    assert read_yaml(Path("mine.yaml"))["task"]["references"] is None
    assert read_yaml(Path("mine.yaml"))["rewards"] == {"words": 1.0}


def test_yes_asks_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch)
    assert main(["new", "--yes", "data=rows.jsonl", "model=builtin:tiny", "minutes=1.5"]) == 0
    assert "1/5" not in capsys.readouterr().out
    config = load_config("my_recipe.yaml")
    assert len(load_data(config).training[0]) + len(load_data(config).held_out["test"]) >= 60
    said = "my_recipe.yaml is there already; name another file"
    assert complaint(capsys, "new", "--yes", "data=rows.jsonl") == said
    assert complaint(capsys, "new", "b.yaml", "--yes").startswith("data= is needed")
    assert "did you mean 'model'" in complaint(capsys, "new", "b.yaml", "--yes", "data=rows.jsonl", "modle=x")
    assert "minutes=0: 0 is no number" in complaint(capsys, "new", "b.yaml", "--yes", "data=rows.jsonl", "minutes=0")
    assert "ends in .yaml, such as b.yaml" in complaint(capsys, "new", "b")
    assert not Path("b.yaml").exists()


def test_an_end_in_the_middle_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "builtin:tiny", "rows.jsonl")
    assert "the input ended before the last question; nothing was written" in complaint(capsys, "new", "mine.yaml")

    def stop() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdin, "readline", stop)
    assert main(["new", "mine.yaml"]) == 130
    assert "stopped; nothing was written" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]


def test_hostile_answers(folder: Path) -> None:
    for number in range(40):
        assert not dialogue(number, folder)


def test_more_minutes_are_more_steps_and_larger_models_fewer() -> None:
    def steps(**answers: object) -> int:
        return int(Draft(data="x", **answers).tree()["steps"])  # type: ignore[arg-type]

    assert steps(minutes=5.0) <= steps(minutes=50.0) < steps(minutes=500.0)
    assert steps(minutes=500.0, model="a/B-7B") < steps(minutes=500.0, model="a/b-135M-x") < 10_000
    assert "prompts" not in Draft(model="builtin:tiny").tree()["task"]
    assert (
        Draft(model="x/y-1B-Instruct").tree()["task"]["prompts"] == "chat"
    )  # its template, or the model is not itself
    assert parameters_of("Qwen/Qwen2.5-0.5B-Instruct") == 5e8 and parameters_of("x/SmolLM2-135M") == 135e6
