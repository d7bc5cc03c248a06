"""Recipes that come with lmgym go by their names; `lmgym recipes` tells the truth about them."""

import json
import re
from pathlib import Path

import pytest

from lmgym import load_config
from lmgym.cli.main import main
from lmgym.config.packaged import described, find_recipe, packaged_recipes
from lmgym.core.availability import NEEDS
from lmgym.core.builtins import BUILTIN, DATA
from tests import runs
from tests.runs import complaint

FEW = [
    "task={name: arithmetic, size: 16, validation_size: 8, test_size: 8}",
    "evaluation.examples=4",
]
SMALL = [
    *FEW,
    "threads=1",
    "policy.model=builtin:tiny",
    f"policy.architecture={json.dumps(runs.ARCHITECTURE)}",
    *(f"stages.{stage}.{key}" for stage in ("warm_start", "rl") for key in ("steps=1", "prompts_per_step=2")),
]


@pytest.mark.slow
def test_a_name_trains_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", *SMALL]) == 0
    run = tmp_path / "runs" / "quickstart"
    assert (run / "final" / "model.safetensors").is_file()
    assert main(["eval", "quickstart", *SMALL]) == 0
    assert "quickstart: 4 prompts" in capsys.readouterr().out
    assert main(["compare", "quickstart", str(run), *FEW]) == 0  # before against after
    assert "quickstart" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [["train"], ["check"]])
def test_an_unknown_name_gets_the_nearest(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, *verb, "quickstrat")
    assert said.startswith("there is no recipe quickstrat, here or among those of lmgym; did you mean 'quickstart'?")


@pytest.mark.parametrize("verb", [["eval"], ["generate", "2 + 2"]])
def test_a_name_that_is_no_model_and_no_recipe_gets_the_nearest(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, verb[0], "quickstrat", *verb[1:])
    assert said.startswith("quickstrat is no run and no recipe; did you mean 'quickstart'?")


def test_a_path_to_nothing_may_have_meant_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "train", "lmgym/recipe/quickstart.yaml")
    assert said.endswith("the one that comes with lmgym is named quickstart")


def test_what_lies_here_comes_first_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart") == packaged_recipes()["quickstart"]
    Path("quickstart").mkdir()
    assert find_recipe("quickstart") == Path("quickstart")
    assert main(["check", "quickstart"]) == 1
    said = capsys.readouterr().err
    assert "quickstart is taken from the current folder" in said
    assert "quickstart is a folder without a recipe.yaml" in said


def test_python_takes_a_name_too() -> None:
    assert [stage.name for stage in load_config("quickstart").stages] == ["warm_start", "rl"]


def test_a_printed_recipe_is_the_beginning_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "quickstart"]) == 0
    mine = tmp_path / "my.yaml"
    mine.write_text(capsys.readouterr().out)
    assert load_config(mine) == load_config("quickstart")
    assert "did you mean 'quickstart'" in complaint(capsys, "recipes", "quickstrat")


def test_the_table_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(packaged_recipes())
    for row in rows:
        assert re.search(rf"^{row['name']} +{re.escape(row['about'])} +{re.escape(row['needs'])}$", table, re.MULTILINE)


@pytest.mark.parametrize("name", packaged_recipes())
def test_what_a_recipe_says_it_needs_is_what_its_keys_need(name: str) -> None:
    """The second and third line of the file, against the model, the tasks and the rewards in it."""
    path = packaged_recipes()[name]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1].startswith("# About: ") and lines[2].startswith("# Needs: ") and len(lines[1]) <= 100
    needs, config = described(name, path).needs, load_config(name)
    on_cpu = config.policy.device == "cpu"
    assert re.match(r"CPU, \d+ minutes?(;|$)" if on_cpu else r"GPU;", needs)
    model = config.policy.model
    assert (f"Hub model {model}" in needs) == bool(re.fullmatch(r"[\w-]+/[\w.-]+", model))
    tasks = {stage.task["name"] for stage in config.stages}
    assert set(re.findall(r"data (\w+)", needs)) == {task for task in tasks if BUILTIN["task"][task].needs == DATA}
    rewards = {key: value for stage in config.stages for key, value in stage.rewards.items()}
    wanted = {need for key in rewards if key in BUILTIN["reward"] for need in BUILTIN["reward"][key].needs.split(", ")}
    assert {need for need in wanted if need in NEEDS and NEEDS[need].argument is None} <= set(re.split("[;,] ", needs))


@pytest.mark.parametrize("name", ["frozen_lake", "blackjack"])
def test_check_estimates_the_memory_of_a_game(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment writes the prompts; the examples have none that the tokenizer could read."""
    assert main(["check", name, "--memory"]) == 0
    assert "memory, estimated for stage" in capsys.readouterr().out
