"""Run folders of older versions, whose files have other names in them: they are evaluated, compared, plotted, exported,
tabulated and resumed like today's, or refused in one sentence."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.logs.plots.training import training_plot
from lmgym.logs.records import read_records
from tests import runs
from tests.runs import complaint

OLD_METRICS = {
    "sampler_logprob_gap": "mismatch/mean",
    "zero_variance_groups": "groups/equal",
    "environment_errors": "broken",
    "environment_errors/low": "broken/low",
    "environment_errors/high": "broken/high",
}
OLD_EPISODE = {
    "reward_components": "parts",
    "error": "broken",
    "selected": "trains",
    "min_new_tokens": "minimum",
}
ERRORS = {"mean": 0.25, "low": 0.1, "high": 0.4, "count": 8}  # an evaluation in which environments failed


def renamed(tree: Any, names: dict[str, str]) -> Any:
    if isinstance(tree, dict):
        return {names.get(key, key): renamed(value, names) for key, value in tree.items()}
    return [renamed(item, names) for item in tree] if isinstance(tree, list) else tree


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change each line of a .jsonl file, or a .json file."""
    if path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in path.read_text().splitlines()))


def with_errors(evaluations: dict[str, Any]) -> dict[str, Any]:
    for kept in evaluations.values():
        if isinstance(kept, dict) and "results" in kept:
            kept["results"]["environment_errors"] = ERRORS
    return renamed(evaluations, OLD_METRICS)


def old_state(state: dict[str, Any]) -> dict[str, Any]:
    """Format 2 did not count records."""
    kept = {name: value for name, value in state.items() if name != "records"}
    return {**kept, "format": 2, "progress": with_errors(state["progress"])}


def make_old(folder: Path) -> None:
    """Write a run folder's files as older versions wrote them."""
    rewrite(folder / "metrics.jsonl", lambda record: renamed(record, OLD_METRICS))
    rewrite(folder / "rollouts.jsonl", lambda record: renamed(record, OLD_EPISODE))
    rewrite(folder / "summary.json", with_errors)
    for saved in (folder / "checkpoints").iterdir():
        rewrite(saved / "state.json", old_state)
        (saved / "fingerprint.json").unlink()
        rewrite(saved / "algorithm.json", lambda state: renamed(state, OLD_EPISODE))
        written = json.loads((saved / "manifest.json").read_text())
        files = {name: saved / name for name in written if name != "fingerprint.json"}
        manifest = {
            name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for name, path in files.items()
        }
        (saved / "manifest.json").write_text(json.dumps(manifest))
    for copied in folder.glob("copies/*"):
        (copied / "manifest.json").unlink()


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        return runs.run(tmp_path_factory.mktemp("runs") / "today")


@pytest.fixture
def old(today: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    shutil.copytree(today, folder)
    make_old(folder)
    return folder


def test_records_have_the_names_of_today(today: Path, old: Path) -> None:
    assert '"groups/equal"' in (old / "metrics.jsonl").read_text() and '"parts"' in (old / "rollouts.jsonl").read_text()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert list(read_records(old / name)) == list(read_records(today / name))
        lines = (today / name).read_text().splitlines()
        assert list(read_records(today / name)) == [json.loads(line) for line in lines]


def test_a_record_of_failed_environments(tmp_path: Path) -> None:
    """ "broken" was a share in metrics.jsonl and a sentence in rollouts.jsonl."""
    place = {"kind": "evaluation", "stage": 0, "step": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**place, "broken": 0.25, "broken/low": 0.1}) + "\n")
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({**place, "broken": "ValueError", "turns": []}) + "\n")
    shares, sentences = (list(read_records(tmp_path / f"{name}.jsonl")) for name in ("metrics", "rollouts"))
    assert shares == [{**place, "environment_errors": 0.25, "environment_errors/low": 0.1}]
    assert sentences == [{**place, "error": "ValueError", "turns": []}]


def test_it_is_evaluated_compared_plotted_and_exported(
    today: Path, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for folder in (today, old):
        assert main(["eval", str(folder)]) == 0
        said.append(capsys.readouterr().out.splitlines()[1:-1])  # without the folder's name
        assert main(["export", str(folder), "--to", str(tmp_path / f"model-{folder.name}"), "--merge"]) in (0, 1)
        said[-1] += capsys.readouterr().err.replace(str(folder), "").splitlines()
    assert said[0] == said[1]
    assert main(["compare", str(today), str(old)]) == 0
    assert "no prompt differs" in capsys.readouterr().out
    training_plot(old / "metrics.jsonl", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_it_is_resumed(today: Path, old: Path, tmp_path: Path) -> None:
    """Bit for bit like today's; a metric of the evaluation before is found again under its name of today."""
    longer = tmp_path / "longer"
    shutil.copytree(today, longer)
    for folder in (longer, old):
        assert main(["train", str(folder), "steps=8"]) == 0
    assert (old / "final/model.safetensors").read_bytes() == (longer / "final/model.safetensors").read_bytes()
    assert runs.records(longer / "metrics.jsonl") == [
        {name: value for name, value in record.items() if name.split("/")[0] not in runs.CLOCKS}
        for record in read_records(old / "metrics.jsonl")
    ]
    before = json.loads((old / "summary.json").read_text())["before"]
    assert before["results"]["environment_errors"] == ERRORS and "broken" not in before["results"]


def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replay keeps whole episodes, whose fields have other names now."""
    algorithm = {"name": "replay", "group_size": 4, "replayed": 2}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, steps=3, evaluation={"every": 0, "examples": 4})
    make_old(folder)
    said = complaint(capsys, "train", folder, "steps=5")
    assert "algorithm.json is not a state of this algorithm" in said and "another version of lmgym" in said


def test_several_old_runs_of_one_recipe_make_a_table(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", steps=2, evaluation={"every": 0, "examples": 4})
    command = ["train", str(recipe), "runs.seeds=[0,1]", f"out={tmp_path}/seeds"]
    assert main(command) == 0
    for folder in (tmp_path / "seeds").glob("seed-*"):
        make_old(folder)
    assert main(command) == 0  # all are finished: only the table is made anew
    results = json.loads((tmp_path / "seeds" / "results.json").read_text())
    assert results["settings"][0]["after"]["results"]["environment_errors"]["mean"] == ERRORS["mean"]
    assert "| environment_errors |" in (tmp_path / "seeds" / "table.md").read_text()
