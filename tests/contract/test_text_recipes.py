"""RL4LMs' recipes of text to text train a tiny encoder-decoder: two steps on rows of our own in the original schema,
ten on real ones, where ../shared has them. Everything but model, sizes and lengths is as in the recipe; and since
random bytes have hardly a word in common with a reference, they are paid for digits besides."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.config.build import load_config
from lmgym.core.availability import availability_of
from tests import learned_models, runs
from tests.contract.test_rl4lms_tasks import task_arguments
from tests.models import SHARED, needs_shared

RECIPES = {
    "cnn_daily_mail_ppo": "cnn_daily_mail",
    "translation_ppo": "iwslt2017",
    "totto_ppo": "totto",
    "daily_dialog_ppo": "daily_dialog",
}
INTENTS = {0: "inform", 1: "question", 2: "directive", 3: "commissive"}
MOST = 64  # tokens (bytes) of a prompt, fewer than most of these have

pytestmark = [pytest.mark.slow]


def news(folder: Path) -> dict[str, Any]:
    """A thousand articles of the validation split, cut into three."""
    with (SHARED / "data" / "cnn_dailymail" / "validation_subset.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    for split, part in (("train", rows[:100]), ("validation", rows[100:120]), ("test", rows[120:140])):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *part])
    return {"path": str(folder)}


def captions(folder: Path) -> dict[str, Any]:
    """Captions of pictures, in place of talks."""
    return {"name": "multi30k", "path": str(SHARED / "data" / "multi30k_ende"), "limit": 200}


def tables(folder: Path) -> dict[str, Any]:
    return {"path": str(SHARED / "data" / "totto")}


def dialogues(folder: Path) -> dict[str, Any]:
    """The dialogues of validation to train on, those of test in two halves."""
    source = SHARED / "data" / "dailydialog"
    rows = [json.loads((source / f"{name}.json").read_text(encoding="utf-8")) for name in ("validation", "test")]
    parts = {"train": rows[0][:60], "validation": rows[1][:20], "test": rows[1][20:40]}
    for split, part in parts.items():
        (folder / f"{split}.json").write_text(json.dumps(part))
    return {"path": str(folder)}


REAL: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cnn_daily_mail_ppo": news,
    "translation_ppo": captions,
    "totto_ppo": tables,
    "daily_dialog_ppo": dialogues,
}


def train(recipe: str, task: dict[str, Any], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train the recipe in small; the records of its metrics."""
    path = runs.ROOT / "lmgym" / "recipes" / f"{recipe}.yaml"
    wanted: dict[str, Any] = {f"task.{key}": value for key, value in task.items()}
    wanted |= {"policy.model": "builtin:tiny_t5", "policy.device": "cpu", "policy.max_prompt_tokens": MOST}
    wanted |= {"threads": 1, "steps": steps, "prompts_per_step": 4, "algorithm.minibatches": 2, "checkpoint.every": 0}
    wanted |= {"sampling.max_new_tokens": 12, "sampling.min_new_tokens": 2, "optimizer.learning_rate": 1e-3}
    wanted |= {"evaluation.examples": 4, "evaluation.every": 5}
    if availability_of("WordNet for NLTK").runs != "yes":  # METEOR's synonyms are nobody's to bring along
        if "meteor" in load_config(path).stages[0].rewards:
            wanted["rewards"] = {"meteor_stem": 1.0}
        if recipe == "daily_dialog_ppo":
            wanted["rewards.intent_accuracy.synonyms"] = False
    if recipe == "daily_dialog_ppo":
        wanted["rewards.intent_accuracy.model"] = learned_models.classifier(folder / "intents", INTENTS)
    wanted["rewards.regex"] = {"pattern": "[0-9]", "weight": 1.0}
    given = [f"{key}={json.dumps(value)}" for key, value in wanted.items()]
    assert main(["train", str(path), f"out={folder / 'run'}", *given]) == 0
    return runs.records(folder / "run" / "metrics.jsonl")


def check(records: list[dict[str, Any]], recipe: str, steps: int, said: str) -> None:
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(steps))
    for record in trained:
        assert all(math.isfinite(record[name]) for name in ("loss/policy", "loss/value", "gradient_norm", "reward"))
    if steps == 10:
        assert max(record["gradient_norm"] for record in trained) > 0
        assert len({record["reward"] for record in trained}) > 1
    evaluated = [record for record in records if record["kind"] == "evaluation"]
    config = load_config(runs.ROOT / "lmgym" / "recipes" / f"{recipe}.yaml")
    assert {name for name in config.evaluation.metrics} <= set(evaluated[-1])
    assert "distinct_1/corpus" in evaluated[-1] and evaluated[-1]["distinct_1/corpus/low"] is None
    side = {"left": "beginning", "right": "end"}[config.policy.truncation_side]
    cut = rf"[1-9][\d,]* of [\d,]+ prompts are longer than .* \({MOST}\); these lose their {side}"
    assert re.search(f"stage train: {cut}", said)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_on_rows_in_the_original_schema(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sacrebleu")
    pytest.importorskip("nltk")
    data = tmp_path / "data"
    data.mkdir()
    _lengthen(RECIPES[recipe], data)
    check(train(recipe, {"path": str(data)}, 2, tmp_path), recipe, 2, capsys.readouterr().out)


@needs_shared
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps_on_real_rows(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sacrebleu")
    pytest.importorskip("nltk")
    data = tmp_path / "data"
    data.mkdir()
    check(train(recipe, REAL[recipe](data), 10, tmp_path), recipe, 10, capsys.readouterr().out)


def _lengthen(task: str, folder: Path) -> None:
    """Rows of `task_arguments`, the texts of summaries and translations longer than a prompt may be."""
    task_arguments(task, folder)
    for file in folder.glob("*.jsonl"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(" is a text", f" is a {'long ' * 15}text"), encoding="utf-8")
