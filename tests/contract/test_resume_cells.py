"""Each cell of what may change when a run is resumed (tests/resume_cells.py) has the right answer; the page says so."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.training.resuming import fingerprint
from lmgym.training.resuming.differences import differences
from lmgym.training.resuming.verdicts import Differences
from lmgym.training.run import Progress
from lmgym.training.setup import load_data
from tests import resume_cells
from tests.resume_cells import CELLS, Cell

ELSEWHERE = {
    "model": {"base weights": "1", "base tokenizer": "2"},
    "versions": dict.fromkeys(("torch", "transformers", "python", "lmgym"), "1"),
    "machine": {"device": "an abacus", "threads": 1, "precision": "float32"},
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cells") / "pristine"
    resume_cells.write_world(folder)
    return folder


@pytest.fixture
def world(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh copy of all files, always in the same place, whose modules can be imported."""
    folder = pristine.with_name("world")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(pristine)
    yield folder
    forget_modules()


def forget_modules() -> None:
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith((registry.PLUGIN_FILE, "cells_"))]:
        del sys.modules[name]
    registry._registered["reward"].pop("cells_plugin", None)


def stands_on(recipe: dict[str, Any], elsewhere: dict[str, Any]) -> fingerprint.Fingerprint:
    forget_modules()
    config = build_config(recipe)
    found = fingerprint.of_recipe(config, load_data(config))
    found |= {part: {**names, **elsewhere.get(part, {})} for part, names in ELSEWHERE.items()}
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.what} {cell.recipe} {cell.place}")
def test_a_change_has_its_answer(cell: Cell, world: Path) -> None:
    recipe = resume_cells.variant(world, cell.recipe)
    before = stands_on(recipe, {})
    cell.change(world, recipe)
    now = stands_on(recipe, cell.machine)
    found = differences(before, now, Progress(*cell.place))
    verdict = "refused" if found.refused else "recorded" if found.recorded else "free" if found.free else "same"
    assert verdict == cell.verdict, (verdict, found)
    sentences = {"refused": found.refused, "recorded": found.recorded, "free": found.free, "same": []}[verdict]
    key = cell.said or cell.what.partition("`")[2].partition("`")[0]
    assert verdict == "same" or any(key in sentence for sentence in sentences), (key, sentences)
    begun_anew = [name for name, is_so in (("best", found.other_best), ("early", found.other_early)) if is_so]
    assert verdict == "refused" or " ".join(begun_anew) == cell.anew, found


@pytest.mark.parametrize(
    ("section", "verdict"),
    [
        ({}, "free"),
        ({"optimizer": {"schedule": "constant_with_warmup"}}, "free"),
        ({"optimizer": {"schedule": "inverse_sqrt"}}, "free"),
        ({"optimizer": {"schedule": "constant", "warmup_ratio": 0.1}}, "recorded"),
        ({"optimizer": {"schedule": "cosine"}}, "recorded"),
        ({"algorithm": {"name": "ppo", "clip_final_fraction": 0.0}}, "recorded"),
        ({"algorithm": {"name": "ppo", "entropy_final_fraction": 0.0}}, "free"),  # there is no bonus
        ({"algorithm": {"name": "ppo", "entropy_final_fraction": 0.0, "entropy_coefficient": 0.1}}, "recorded"),
    ],
)
def test_more_steps_are_free_unless_something_falls_over_the_stage(section: dict[str, Any], verdict: str) -> None:
    """A schedule over the steps of a stage has another value at the same step if the stage is longer."""
    task = {"name": "arithmetic", "size": 4, "test_size": 2}
    recipe = {"policy": {"model": "builtin:tiny_gpt2", "tokenizer": "builtin:bytes"}, "task": task, "steps": 4,
              "rewards": {"length": {"target": 2}}, "algorithm": "reinforce", **section}  # fmt: skip
    before, now = stands_on(recipe, {}), stands_on({**recipe, "steps": 8}, {})
    found = differences(before, now, Progress(0, 2))
    assert found == Differences(**{verdict: ["steps was 4 and is 8"]})


def test_there_are_enough_cells_and_the_page_has_them() -> None:
    assert len(CELLS) >= 115 and len({(cell.what, cell.recipe, cell.place) for cell in CELLS}) == len(CELLS)
    assert resume_cells.PAGE.read_text() == resume_cells.page(), "run python -m tests.resume_cells"
