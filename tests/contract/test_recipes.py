"""Every recipe trains: two steps per stage, with its own settings but for the model and the sizes."""

import json
from pathlib import Path

import pytest
import yaml

from lmgym.cli import main
from tests import runs
from tests.runs import no_picture  # noqa: F401 (a fixture)

RECIPES = sorted((runs.ROOT / "recipes").glob("*.yaml"))
SMALL = {"prompts_per_step": 2, "steps": 2, "sampling.max_new_tokens": 4, "sampling.min_new_tokens": 0}
POLICY = {
    "model": "builtin:tiny",
    "device": "cpu",
    "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 8192},
}
FEWER = {"arithmetic": {"size": 32, "test_size": 8, "validation_size": 8}}


def gsm8k_folder(folder: Path) -> Path:
    """A dozen problems a split, in the original format."""
    for split in ("train", "test"):
        rows = [
            {
                "question": f"In the {split} set, Ann has {n} pens and buys {n} more. How many has she?",
                "answer": f"She has {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n} pens.\n#### {2 * n}",
            }
            for n in range(2, 14)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overrides(recipe: Path, folder: Path) -> list[str]:
    tree = yaml.safe_load(recipe.read_text())
    stages = tree.get("stages") or []
    wanted = {"policy": POLICY, "threads": 1, "evaluation.examples": 4, "evaluation.every": 1, "checkpoint.every": 1}
    sections = [(f"stages.{number}.", stage) for number, stage in enumerate(stages)] or [("", {})]
    for where, stage in sections:
        wanted |= {where + key: value for key, value in SMALL.items()}
        task = stage.get("task", tree.get("task"))
        name = task if isinstance(task, str) else task["name"]
        wanted |= {f"{where}task.{key}": value for key, value in FEWER.get(name, {}).items()}
        if name == "gsm8k":
            wanted[f"{where}task.path"] = str(gsm8k_folder(folder))
    return [f"{key}={json.dumps(value)}" for key, value in wanted.items()]


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps_a_stage(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["train", str(recipe), f"out={folder}", *overrides(recipe, tmp_path)]) == 0
    stages = len(yaml.safe_load(recipe.read_text()).get("stages") or [{}])
    steps = [(r["stage"], r["step"]) for r in runs.records(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == [(stage, step) for stage in range(stages) for step in (0, 1)]
    assert (folder / "final" / "model.safetensors").is_file()


def test_there_are_recipes() -> None:
    assert "quickstart" in {recipe.stem for recipe in RECIPES}
