"""Every recipe trains: two steps per stage, with its own settings but for the model and the sizes."""

import json
from pathlib import Path

import pytest
import yaml

from lmgym.cli.main import main
from lmgym.config.build import load_config
from tests import learned_models, runs

ELSEWHERE = {"cnn_daily_mail_ppo", "daily_dialog_ppo", "totto_ppo", "translation_ppo"}  # test_text_recipes.py
RECIPES = sorted(path for path in (runs.ROOT / "lmgym" / "recipes").glob("*.yaml") if path.stem not in ELSEWHERE)
SMALL = {"prompts_per_step": 2, "steps": 2, "sampling.max_new_tokens": 4, "sampling.min_new_tokens": 0}
POLICY = {
    "model": "builtin:tiny",
    "device": "cpu",
    "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 8192},
}
SEES = {"model": "builtin:tiny_idefics3", "device": "cpu", "train_vision": True}
FEWER = {name: {"size": 32, "test_size": 8, "validation_size": 8} for name in ("arithmetic", "shapes")}


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


def math_folder(folder: Path) -> Path:
    """A dozen problems a split, in the format of MATH."""
    for split in ("train", "test"):
        rows = [
            {
                "problem": f"{split}: ${n} + {n}$?",
                "solution": f"$\\boxed{{{2 * n}}}$",
                "level": "Level 3",
                "type": "Algebra",
            }
            for n in range(2, 14)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def jsonl_files(folder: Path) -> str:
    """A dozen prompts a split, for recipes whose texts are prepared beforehand."""
    for split in ("train", "validation", "test"):
        rows = [{"prompt": f"In {split}, film {n} was", "references": f" number {n}."} for n in range(12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder}/{{split}}.jsonl"


def pair_files(folder: Path) -> str:
    """A dozen pairs a split."""
    for split in ("train", "validation"):
        rows = [{"prompt": f"{split} {n}: ", "chosen": f"{n} {n + 1}", "rejected": f"{n} 0"} for n in range(12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder}/{{split}}.jsonl"


def svamp_file(folder: Path) -> Path:
    """Three dozen problems in SVAMP's format."""
    rows = [
        {"ID": f"own-{n}", "Body": f"Ann has {n} pens.", "Question": "And two more?", "Equation": f"( {n}.0 + 2.0 )"}
        | {"Answer": n + 2.0}
        for n in range(36)
    ]
    (folder / "SVAMP.json").write_text(json.dumps(rows))
    return folder / "SVAMP.json"


LOCAL = {
    "data": svamp_file,
    "gsm8k": gsm8k_folder,
    "math": math_folder,
    "jsonl": jsonl_files,
    "preferences": pair_files,
}


def overrides(recipe: Path, folder: Path) -> list[str]:
    wanted = {"policy": POLICY, "threads": 1, "evaluation.examples": 4, "evaluation.every": 1, "checkpoint.every": 1}
    staged = "stages" in yaml.safe_load(recipe.read_text())
    config, judges = load_config(recipe), {}
    if config.policy.model == SEES["model"]:
        wanted["policy"] = SEES
    for number, stage in enumerate(config.stages):
        where = f"stages.{number}." if staged else ""
        wanted |= {where + key: value for key, value in SMALL.items()}
        wanted |= {f"{where}task.{key}": value for key, value in FEWER.get(stage.task["name"], {}).items()}
        if stage.task["name"] in LOCAL:
            wanted[f"{where}task.path"] = str(LOCAL[stage.task["name"]](folder))
        if stage.algorithm.requirements.teacher:
            wanted[f"{where}algorithm.teacher"] = "builtin:tiny"
        judges |= {f"{where}rewards.{name}": value for name, value in stage.rewards.items()}
    judges |= {f"evaluation.metrics.{name}": value for name, value in config.evaluation.metrics.items()}
    for key, value in judges.items():
        if isinstance(value, dict) and "model" in value:
            made = learned_models.scalar if key.endswith("reward_model") else learned_models.classifier
            wanted[key] = {**value, "model": made(folder / "judge")}
    return [f"{key}={json.dumps(value)}" for key, value in wanted.items()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps_a_stage(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if "math_equal" in recipe.read_text():
        pytest.importorskip("math_verify")
    assert main(["train", str(recipe), f"out={folder}", *overrides(recipe, tmp_path)]) == 0
    stages = len(load_config(recipe).stages)
    steps = [(r["stage"], r["step"]) for r in runs.records(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == [(stage, step) for stage in range(stages) for step in (0, 1)]
    assert (folder / "final" / "model.safetensors").is_file()


def test_there_are_recipes() -> None:
    assert "quickstart" in {recipe.stem for recipe in RECIPES}
