"""Whole runs with pictures on a tiny model that sees: what check prints, that a resumed run is bit for bit the one that
was not stopped, and that the page and the command line show what the model saw."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.pictures.ids import is_piece
from lmgym.training.loop import train
from lmgym.types import PICTURE
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import open_runs
from lmgym.viewer.single_file import write_file
from tests import runs, vision_models
from tests.parity.test_resume import Interrupting
from tests.runs import JUDGED

EYES: dict[str, Any] = {
    "policy": {
        "model": "builtin:tiny_idefics3",
        "device": "cpu",
        "train_vision": True,
        "architecture": {**runs.ARCHITECTURE, "max_position_embeddings": 256},
    },
    "task": {"name": "shapes", "size": 16, "test_size": 4, "validation_size": 4},
    "rewards": {"length": {"unit": "characters", "target": 6}},
    "evaluation": {"every": 2, "examples": 2},
    "checkpoint": {"every": 2},
    "prompts_per_step": 2,
}


def test_a_run_with_pictures_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = runs.run(tmp_path / "whole", **EYES, steps=4)
    runs.run(tmp_path / "parts", **EYES, steps=2)
    parts = train(build_config(runs.tiny(**EYES, steps=4, out=str(tmp_path / "parts"))), Console(quiet=True))
    runs.assert_equal_runs(whole, parts)
    for name in ("model.safetensors", "preprocessor_config.json"):
        assert (whole / "final" / name).read_bytes() == (parts / "final" / name).read_bytes()
    # The records name the pictures, the run folder has them, and the words are plain.
    record = json.loads((whole / "rollouts.jsonl").read_text().splitlines()[-1])
    pieces = [id for id in record["turns"][0]["prompt_ids"] if is_piece(id)]
    assert len(pieces) == 16 and record["prompt"].startswith(f"{PICTURE}How many ")
    stored = {path.stem for path in (whole / "pictures").rglob("*.png")}
    assert stored == {path.stem for path in (parts / "pictures").rglob("*.png")} and len(stored) >= 18
    # The page shows it beside the answer, and so does the single file.
    capsys.readouterr()
    [run] = open_runs([whole])
    [row] = tree_at([run], "runs/0/answers/train/0/0/0")["rows"]
    [(place, address)] = row["pictures"].items()
    assert row["pieces"][int(place)] == PICTURE and address.startswith("data:image/png;base64,")
    write_file([run], tmp_path / "page.html", 20)
    assert address.encode() in (tmp_path / "page.html").read_bytes()
    # The command line asks about a picture.
    picture = next((whole / "pictures").rglob("*.png"))
    assert main(["generate", str(whole), "--prompt", "How many?", "--picture", str(picture), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prompt"] == f"{PICTURE}How many?" and said["full_prompt"].count(PICTURE) == 1
    assert said["full_prompt"].endswith("How many?\nAnswer:")
    assert main(["generate", str(whole), "--prompt", "?", "--picture", str(whole / "recipe.yaml")]) == 1
    assert "--picture" in (complaint := capsys.readouterr().err) and "the picture cannot be read" in complaint


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "gemma3"])
def test_every_architecture_goes_on_where_it_stopped(family: str, tmp_path: Path) -> None:
    model = str(vision_models.write(family, tmp_path / "model"))
    keys = {
        **EYES,
        "policy": {"model": model, "device": "cpu", "train_vision": True},
        "evaluation": {"every": 0, "examples": 2},
        "steps": 2,
    }
    whole = runs.run(tmp_path / "whole", **keys)
    runs.run(tmp_path / "parts", Interrupting(at=1), **keys)
    parts = runs.run(tmp_path / "parts", **keys)
    runs.assert_equal_runs(whole, parts)
    assert (whole / "final" / "processor_config.json").read_bytes() == Path(model, "processor_config.json").read_bytes()


LEARNING: dict[str, dict[str, Any]] = {  # one of each way in which an update uses the policy
    "values, and a frozen copy": {"algorithm": {"name": "ppo", "epochs": 2, "kl_coefficient": 0.1}},
    "rated answers": {"algorithm": "dpo", "rewards": None},
    "a teacher's distributions": {
        "algorithm": {"name": "gkd", "teacher": "builtin:tiny_idefics3", "divergence": "jsd", "beta": 0.3},
        "rewards": None,
    },
    "adapters, switched off": {
        "algorithm": {"name": "grpo", "group_size": 2, "kl_coefficient": 0.1},
        "policy": {**EYES["policy"], "lora_rank": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_every_way_of_learning_goes_with_pictures(name: str, tmp_path: Path) -> None:
    changes = {**EYES, "evaluation": {"every": 0, "examples": 2}, "checkpoint": {"every": 0}, "steps": 1}
    if name == "rated answers":
        file = io.BytesIO()
        Image.new("RGB", (8, 8), "red").save(file, "PNG")
        packed = base64.b64encode(file.getvalue()).decode()
        rows = [{"image": packed, "prompt": f"{n}?", "chosen": "1", "rejected": "0"} for n in range(4)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes["task"] = {"name": "preferences", "path": str(tmp_path / "pairs.jsonl"), "test": 0.5}
    folder = runs.run(tmp_path / "run", **{**changes, **LEARNING[name]})
    [record] = [one for one in runs.records(folder / "metrics.jsonl") if one["kind"] == "train"]
    assert record["gradient_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"algorithm": "reward_model", "task": JUDGED, "rewards": None},
            "a reward model reads texts, and idefics3 reads",
        ),
        ({"distributed": {"sharding": "fsdp"}}, "distributed.sharding: builtin:tiny_idefics3 reads pictures, and such"),
    ],
)
def test_what_does_not_go_with_pictures_is_refused_before_a_step(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(LmgymError, match=sentence):
        runs.run(tmp_path / "run", **{**EYES, **changes})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_check_names_a_prompt_s_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path / "eyes.yaml", **EYES)
    main(["check", str(recipe)])
    said, warned = capsys.readouterr()
    assert "hold marks of a chat template" not in warned + said  # a picture is none
    assert re.search(r"pictures of the data: 20, \d+ KiB, which the run folder will hold", said)
    assert "pictures of the environment" not in said
    assert re.search(r"⟦picture [0-9a-f]{10}: 16 tokens⟧⟦<fake_token_around_image>⟧How many", " ".join(said.split())), (
        said
    )


def test_a_model_without_eyes_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"a prompt holds a picture, and the model sees none: take a vision-language"):
        runs.run(tmp_path / "blind", **{**EYES, "policy": runs.TINY["policy"]})
