"""`lmgym bisect`: planted causes are found at their step, and two runs part where they really do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.config.build import load_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.experiments.bisect.change import find_change
from lmgym.experiments.bisect.parting import find_parting
from lmgym.logs.console import Console
from lmgym.training.loop import train
from lmgym.types import Example
from tests import runs
from tests.runs import complaint

AT = 17  # where a cause is planted
LONG: dict[str, Any] = {
    "steps": 36,
    "evaluation": {"every": 0, "examples": 2},
    "checkpoint": {"every": 0},
    "logs": {"samples": 0},
    "prompts_per_step": 8,
}
BAD = (
    "rewards={length: {unit: characters, target: 6}, regex: {pattern: '[0-9]', weight: 0.5}, "
    "bad: {reward: regex, pattern: '[a-z]', weight: -2.0}}"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to the step where a cause is planted."""
    return runs.run(tmp_path_factory.mktemp("bisect") / "run", **LONG | {"steps": AT})


def gone_on(begun: Path, to: Path, *changes: str) -> Path:
    folder = Path(shutil.copytree(begun, to))
    train(load_config(folder / "recipe.yaml", [*changes, f"out={folder}", "steps=36"]), Console(quiet=True))
    return folder


def test_a_wrong_learning_rate_is_found(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gone_on(begun, tmp_path / "run", "optimizer.learning_rate=0.1")
    change = find_change(folder)
    assert change is not None and AT <= change.step <= AT + 3 and not change.alone
    assert change.moved[0].name == "learning_rate" and change.moved[0].step == AT
    assert change.moved[0].before == pytest.approx(0.003, rel=0.2) and change.moved[0].after == pytest.approx(0.1)
    assert any("learning_rate was 0.003 and is 0.1" in text for text in change.resumed)
    assert main(["bisect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"reward changes at step {change.step + 1}" in said and f"step {AT + 1}  learning_rate: " in said
    assert main(["bisect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == change.step


def test_a_bad_reward_part_is_found(begun: Path, tmp_path: Path) -> None:
    change = find_change(gone_on(begun, tmp_path / "run", BAD))
    assert change is not None and abs(change.step - AT) <= 1
    assert any("bad" in text for text in change.resumed)
    assert {"reward", "reward/bad"} <= {one.name for one in change.moved}


def test_a_poisoned_batch_is_found(tmp_path: Path) -> None:
    calls = []

    def poison(texts: list[str], examples: list[Example]) -> list[float]:
        calls.append(len(texts))
        wrong = calls.count(32) == AT + 1  # answers of a step
        return [(20.0 if number % 2 else -20.0) if wrong else 0.0 for number in range(len(texts))]

    registry.register("reward", "poisoned_once")(poison)
    rewards = runs.TINY["rewards"] | {"poisoned_once": 1.0}
    try:
        folder = runs.run(tmp_path / "run", **LONG | {"rewards": rewards})
    finally:
        registry._registered["reward"].pop("poisoned_once")
    change = find_change(folder, "advantage/std")
    assert change is not None and change.alone and change.step == AT
    assert "gradient_norm" in [one.name for one in change.moved] and change.strongest


def test_two_runs_part_where_they_do(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = gone_on(begun, tmp_path / "rate", "optimizer.learning_rate=0.1")
    same = gone_on(begun, tmp_path / "same")
    parting = find_parting(same, other)
    assert (parting.step, parting.equal_steps) == (AT, AT)
    assert (parting.part, parting.name) == ("the learning rate", "learning_rate") and parting.others == []
    reward = find_parting(same, gone_on(begun, tmp_path / "bad", BAD))
    assert (reward.step, reward.part) == (AT, "the rewards") and "the gradient" in reward.others
    again = find_parting(same, Path(shutil.copytree(same, tmp_path / "copy")))
    assert again.step is None and again.equal_steps == 36 and again.keys == []
    assert main(["bisect", str(same), str(other)]) == 0
    said = capsys.readouterr().out
    assert f"{AT} steps are equal, bit for bit; then they part at step {AT + 1}" in said
    assert "optimizer.learning_rate: 0.003 and 0.1" in said


def test_the_traces_of_each_run_are_listed_once(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each step: two runs of 20,000 steps would take hours."""
    from lmgym.experiments.bisect import parting

    listed, shards = list[Path](), parting.shards
    monkeypatch.setattr(parting, "shards", lambda folder: listed.append(folder) or shards(folder))
    assert find_parting(begun, begun).equal_steps == AT and len(listed) == 2


def test_another_seed_parts_at_once(tmp_path: Path) -> None:
    short = LONG | {"steps": 2}
    one, other = (runs.run(tmp_path / str(seed), seed=seed, **short) for seed in (0, 1))
    parting = find_parting(one, other)
    assert (parting.step, parting.part, parting.equal_steps) == (0, "the prompts", 0)
    assert parting.keys == ["seed: 0 and 1"]


def test_a_changed_number_of_one_token_is_found(begun: Path, tmp_path: Path) -> None:
    """The smallest difference: one bit of one column of one answer."""
    from lmgym.logs.traces.trace import read_episode, read_step, write_shard

    folder = Path(shutil.copytree(begun, tmp_path / "run"))
    table = read_step(folder, 0, 5)
    kept = [index for index, own in zip(table.episodes["index"], table.episodes["kept"], strict=True) if own]
    answers = [read_episode(folder, 0, 5, index) for index in kept]
    column = answers[1].rows[0].columns["logprobs_sampler"]
    column[2] = column[2] * (1 + 2**-23)
    write_shard(folder, table, answers)
    parting = find_parting(begun, folder)
    assert (parting.step, parting.name, parting.where) == (5, "logprobs_sampler", f"answer {kept[1]}, token 2")


def test_what_cannot_be_answered(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "which no step of stage 'train' has" in complaint(capsys, "bisect", begun, "--metric", "rewards")
    assert "has no stage 'rl'" in complaint(capsys, "bisect", begun, "--stage", "rl")
    assert "there is no run folder" in complaint(capsys, "bisect", begun, tmp_path / "none")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has no step yet" in complaint(capsys, "bisect", tmp_path)
    lines = (begun / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]))
    with pytest.raises(LmgymError, match="a change needs 10 or more"):
        find_change(tmp_path)
