"""Runs that are resumed after something has changed beside the keys of a recipe: what they then compute, say and write
(each kind of change: test_resume_cells.py)."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.logs.console import Console
from lmgym.logs.records import read_records
from lmgym.training.checkpoints import manifest
from lmgym.training.loop import evaluate_before, finish, stages_left
from lmgym.training.resuming import contents
from lmgym.training.setup import start
from tests import models, runs
from tests.runs import complaint

SHORT: dict[str, Any] = {"steps": 2, "evaluation": {"every": 1, "examples": 4}, "checkpoint": {"every": 1}}
ROOMY = runs.TINY["policy"] | {"architecture": {**runs.ARCHITECTURE, "max_position_embeddings": 512}}


def evaluations(folder: Path) -> dict[str, Any]:
    return runs.state(folder)["progress"]


def resume(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["train", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("metric, mode", [("reward", "max"), ("length/mean", "min")])
def test_the_best_model_by_another_metric_begins_anew(
    metric: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No reward comes near 6 tokens, and nothing is below what "max" has kept; so without this, best/ would stay."""
    evaluation = {**SHORT["evaluation"], "keep_best": "length/mean"}
    folder = runs.run(tmp_path / "run", **{**SHORT, "evaluation": evaluation})
    before = evaluations(folder)["best"]
    assert before["metric"] == "length/mean" and before["value"] > 1.5
    said = resume(capsys, folder, "steps=3", f"evaluation.keep_best={metric}", f"evaluation.keep_best_mode={mode}")
    assert "best/ was chosen by length/mean as it was measured then; the next evaluation begins anew" in said, said
    best = evaluations(folder)["best"]
    records = [one for one in read_records(folder / "metrics.jsonl") if one["kind"] == "evaluation"]
    value = records[-1][metric]
    assert best == {"metric": metric, "value": value, "stage": "train", "step": 3}
    model = "model.safetensors"
    assert (folder / "best" / model).read_bytes() == (folder / "final" / model).read_bytes()


def test_early_stopping_by_another_metric_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the 6 tokens of before no reward would be an improvement, and the run would end at once."""
    folder = runs.run(tmp_path / "run", **SHORT, early_stop={"metric": "length/mean", "patience": 9})
    said = resume(capsys, folder, "steps=3", "early_stop.metric=reward", "early_stop.patience=1")
    assert "early_stop judges by reward anew" in said
    state = evaluations(folder)
    assert state["stop"] is None and state["early_waited"] == 0 and runs.newest(folder).name == "stage-0-step-000003"
    # Another patience is no other metric.
    resume(capsys, folder, "steps=4", "early_stop.patience=2")
    assert evaluations(folder)["early_best"] >= state["early_best"]


def test_a_last_stage_that_has_not_begun_may_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"name": name, "steps": 2} for name in ("one", "two")]
    checkpoints = {"checkpoint": {"every": 1, "keep": 9}}
    folder = runs.run(tmp_path / "run", **{**SHORT, **checkpoints, "stages": stages})
    for path in (folder / "checkpoints").iterdir():
        if path.name != "stage-0-step-000001":
            shutil.rmtree(path)
    runs.write(folder / "recipe.yaml", **{**SHORT, **checkpoints, "stages": stages[:1]})
    assert "stage 'two', which has not begun, is another" in resume(capsys, folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"]["stage"] == "one" and summary["after"]["step"] == 2 and "before" not in summary
    assert "is finished: all 2 steps of its last stage are done" in resume(capsys, folder)
    assert main(["doctor", str(folder)]) == 0


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_loop_of_ones_own_may_end_early(evaluated: bool, tmp_path: Path) -> None:
    config = build_config(runs.tiny(out=str(tmp_path / "run"), **SHORT))
    with start(config, Console(quiet=True)) as run:
        for stage in stages_left(run):
            if evaluated:
                evaluate_before(stage)
            break
        finish(run)
    assert ("before" in json.loads((run.folder / "summary.json").read_text())) == evaluated
    assert (run.folder / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("text", ["~nobody_at_all, you guess", "x" * 300])
def test_a_text_of_an_environment_is_a_text(text: str, tmp_path: Path) -> None:
    """Longer than a path may be, or like the home of a user who does not exist."""
    env = {"name": "conversation", "system_prompt": text}
    recipe = runs.write(tmp_path / "recipe.yaml", **{**SHORT, "env": env}, policy=ROOMY, out=str(tmp_path / "run"))
    assert main(["check", str(recipe), "--memory"]) == 0
    assert main(["train", str(recipe)]) == 0
    assert main(["train", str(tmp_path / "run"), "steps=3"]) == 0


def test_what_a_text_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels" / "one.txt").write_text("1")
    texts = ["", ".", "..", "/", "/dev/zero", "a\0b", "x" * 5000, "~nobody_at_all", "\ud800", "levels", "none/of/these"]
    assert contents.files_of({"name": __file__, "texts": texts}, "env.") == {}
    levels = f"{tmp_path}/levels"
    found = contents.files_of({"a": [3, {"b": levels}], "c": __file__, "d": f"{levels}/one.txt"}, "env.")
    kinds = {key: digest.partition(":")[0] for key, digest in found.items()}
    assert kinds == {"env.a.1.b": "folder", "env.c": "code", "env.d": "file"}
    for name in ("", "../x", "a b/c", "x" * 5000, "nobody/such-a-model", __file__):
        assert contents.model_files(name, None) == {}
    monkeypatch.setattr(contents, "MOST_FILES", 0)
    assert list(contents.files_of({"a": levels}, "")) == []


def test_check_of_a_run_folder_says_what_train_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.run(tmp_path / "run", **SHORT)
    said = complaint(capsys, "check", folder, "seed=1", "steps=3")
    assert "cannot go on from stage-0-step-000002: seed was 0 and is 1" in said
    main(["check", str(folder), "steps=3", "optimizer.learning_rate=0.5", "--memory"])
    said = capsys.readouterr().out
    assert "since the checkpoint (free): steps was 2 and is 3" in said
    assert "since the checkpoint (no longer bit for bit): optimizer.learning_rate was 0.003 and is 0.5" in said
    recipe = runs.write(tmp_path / "recipe.yaml", **SHORT, callbacks={"lmgym:Callback": {"nothing": 1}})
    assert "callbacks: 'lmgym:Callback'" in complaint(capsys, "check", recipe, "--memory")


PLUGIN = """
from lmgym import register

@register("reward", "resume_sign")
def sign(texts, examples):
    return [1.0 * len(text) for text in texts]
"""


def test_a_reward_whose_sign_has_changed_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {kind: {**own} for kind, own in registry._registered.items()})
    path = tmp_path / "resume_sign.py"
    path.write_text(PLUGIN)
    folder = runs.run(tmp_path / "run", **SHORT, plugins=[str(path)], rewards={"resume_sign": 1.0})
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / path.name)
    forget(registry.PLUGIN_FILE)
    assert "bit for bit" not in resume(capsys, folder, "steps=3", f"plugins=[{moved}]")
    moved.write_text(PLUGIN.replace("1.0 *", "-1.0 *"))
    forget(registry.PLUGIN_FILE)
    said = resume(capsys, folder, "steps=4")
    assert "no longer bit for bit" in said and "the code of resume_sign.py has other contents" in said
    (record,) = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "resume"]
    assert record["changed"] == ["the code of resume_sign.py has other contents"] and record["step"] == 3
    forget(registry.PLUGIN_FILE)


def forget(beginning: str) -> None:
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith(beginning)]:
        del sys.modules[name]
    registry._registered["reward"].pop("resume_sign", None)


def test_a_teacher_that_moved_is_the_same_and_one_configured_otherwise_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tmp_path / "teacher"
    models.llama().save_pretrained(teacher)
    models.tokenizer().save_pretrained(teacher)
    algorithm = {"name": "distill", "teacher": str(teacher)}
    policy = {"model": str(teacher), "device": "cpu"}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, policy=policy, rewards=None, **SHORT)
    moved = teacher.rename(tmp_path / "moved")
    said = resume(capsys, folder, "steps=3", f"algorithm.teacher={moved}", f"policy.model={moved}")
    assert "bit for bit" not in said and "in stage 1, after step 2" in said
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    said = complaint(capsys, "train", folder, "steps=4")
    assert f"what algorithm.teacher names ({moved}) has other contents in config.json" in said


def test_a_fingerprint_of_before_knew_only_files_of_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was written then: files beside the data, nothing "read", no digest "without places"."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Guess.")
    env = {"name": "conversation", "system_prompt": str(prompt)}  # the path is the prompt, and may be long
    room = {**runs.TINY["policy"], "architecture": {**runs.ARCHITECTURE, "max_position_embeddings": 1024}}
    folder = runs.run(tmp_path / "run", **SHORT, env=env, policy=room)
    for saved in (folder / "checkpoints").iterdir():
        tree = json.loads((saved / "fingerprint.json").read_text())
        (stage,) = tree.pop("read")["stages"]
        for own in (*tree["data"]["training"], *tree["data"]["held_out"].values()):
            del own["without places"]
        tree["data"]["training"][0]["env files"] = {
            key.removeprefix("env."): digest.removeprefix("file:") for key, digest in stage.items()
        }
        (saved / "fingerprint.json").write_text(json.dumps(tree))
        (saved / "manifest.json").unlink()
        manifest.write(saved)
    assert list(stage) == ["env.system_prompt"]
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    said = resume(capsys, copied, "steps=3")
    assert "bit for bit" not in said and "in stage 1, after step 2" in said
    prompt.write_text("Do not guess.")
    said = complaint(capsys, "train", folder, "steps=3")
    assert f"what env.system_prompt names ({prompt}) has other contents" in said
