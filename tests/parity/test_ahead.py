"""K steps ahead (`engine.ahead`): which weights sample what goes by count, so runs repeat and resume bit for bit."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.training.checkpoints import manifest
from tests import runs
from tests.parity.test_pool import RECIPE, Killing
from tests.parity.test_ranks import launched
from tests.parity.test_resume import Interrupting
from tests.parity.test_resume_environments import NUMBERS
from tests.ranks import Group
from tests.runs import Shell, assert_equal_runs
from tests.torture.ranks import newest_step

pytestmark = [pytest.mark.slow, pytest.mark.processes]
UNIT = 3  # 16 answers of a step are five units and a smaller one
CAPPED: dict[str, Any] = {"name": "grpo", "group_size": 4, "correction": {"name": "truncated", "cap": 2.0}}
CHANGES: dict[str, Any] = {"algorithm": CAPPED, "checkpoint": {"every": 1, "keep": 9}}
CHANGES |= {"evaluation": {"every": 3, "examples": 8}}


def in_turn(ahead: int) -> dict[str, Any]:
    """The engine of one process, which samples ahead before it updates."""
    return {"name": "sampler", "unit": UNIT, "ahead": ahead}


def pool(ahead: int, workers: int) -> dict[str, Any]:
    return {"name": "pool", "unit": UNIT, "ahead": ahead, "workers": workers, "threads": 1}


def versions(run: Path) -> list[int]:
    """The updates that the weights had had that sampled each step's answers, as rollouts.jsonl says."""
    found: dict[int, set[int]] = {}
    for line in runs.records(run / "rollouts.jsonl"):
        if line["kind"] == "train":
            found.setdefault(line["step"], set()).add(line["version"])
    assert [*found] == [*range(len(found))] and all(len(own) == 1 for own in found.values())
    return [version for own in found.values() for version in own]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("ahead", "workers"), [(1, 1), (2, 2), (4, 1)])
def test_a_pool_of_any_size_is_the_process_that_samples_in_turn(ahead: int, workers: int, tmp_path: Path) -> None:
    """The answers of step s come from the weights after s - K updates, whoever samples them."""
    one = runs.run(tmp_path / "one", engine=in_turn(ahead), **CHANGES)
    assert versions(one) == [max(0, step - ahead) for step in range(6)]
    lags = [record.get("version_lag", 0) for record in runs.records(one / "metrics.jsonl") if record["kind"] == "train"]
    assert lags == [min(step, ahead) for step in range(6)]
    assert_equal_runs(one, runs.run(tmp_path / "pool", engine=pool(ahead, workers), **CHANGES), but=RECIPE)


@pytest.mark.usefixtures("cluster")
def test_conversations_go_on_where_a_generator_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches are computed again, with the weights that they began with, while newer ones were sent."""
    game = {"name": "guess_number", "style": "numbers", "high": 9, "guesses": 3}
    changes: dict[str, Any] = {**CHANGES, "env": game, "task": None, "rewards": {}, "policy": NUMBERS, "steps": 4}
    changes |= {"sampling": {"max_new_tokens": 2}, "evaluation": None}
    one = runs.run(tmp_path / "one", engine=in_turn(2), **changes)
    killing = Killing(monkeypatch, pushes=(2,))
    assert_equal_runs(one, runs.run(tmp_path / "pool", engine=pool(2, 1), **changes), but=RECIPE)
    assert killing.kills == 1  # while it sampled for the last step with weights 1, and 2 were sent


@pytest.mark.usefixtures("cluster")
def test_further_draws_are_of_the_newest_weights(tmp_path: Path) -> None:
    """Dynamic sampling draws again while answers ahead are in flight."""
    changes: dict[str, Any] = {**CHANGES, "algorithm": {**CAPPED, "name": "dapo"}, "max_draws": 6, "steps": 4}
    changes |= {"rewards": {"regex": {"pattern": "[0-9]"}}}
    one = runs.run(tmp_path / "one", engine=in_turn(2), **changes)
    lags = [line.get("version_lag", 0) for line in runs.records(one / "metrics.jsonl") if line["kind"] == "train"]
    assert any(lag % 1 for lag in lags)  # a step has answers of two versions
    assert_equal_runs(one, runs.run(tmp_path / "pool", engine=pool(2, 1), **changes), but=RECIPE)


def test_the_first_step_is_that_of_a_run_without(tmp_path: Path) -> None:
    several = [runs.run(tmp_path / str(ahead), engine=in_turn(ahead), **CHANGES, steps=2) for ahead in (0, 1)]
    records = [[line for line in runs.records(run / "rollouts.jsonl") if line["kind"] == "train"] for run in several]
    first, second = ([[line for line in own if line["step"] == step] for own in records] for step in (0, 1))
    assert first[0] == first[1] and second[0] != second[1]


def test_a_stopped_run_keeps_what_is_in_flight(tmp_path: Path) -> None:
    one = runs.run(tmp_path / "one", engine=in_turn(4), **CHANGES)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), engine=in_turn(4), **CHANGES)
    kept = runs.newest(halves) / "ahead.json"
    assert [draw["step"] for draw in json.loads(kept.read_text())["draws"]] == [2, 3, 4, 5]
    runs.run(halves, engine=in_turn(4), **CHANGES)
    assert_equal_runs(one, halves)
    assert not (runs.newest(one) / "ahead.json").exists()  # nothing is sampled for a step that does not come


def test_a_checkpoint_of_one_step_ahead_as_it_was_is_read(tmp_path: Path) -> None:
    """Its only draw had no list around it. One that is no draw is named."""
    one = runs.run(tmp_path / "one", engine=in_turn(1), **CHANGES)
    halves = runs.run(tmp_path / "halves", Interrupting(at=2), engine=in_turn(1), **CHANGES)
    kept = runs.newest(halves) / "ahead.json"
    [draw] = json.loads(kept.read_text())["draws"]
    for tree in ({"draws": [{"step": 2, "episodes": {"0": [{}]}}]}, {"draws": 5}, {"draws": [7]}):
        kept.write_text(json.dumps(tree))
        manifest.write(kept.parent)
        with pytest.raises(LmgymError, match=r"ahead\.json holds no answers of a step \((Key|Type|Attribute)Error"):
            runs.run(halves, engine=in_turn(1), **CHANGES)
    kept.write_text(json.dumps(draw))
    manifest.write(kept.parent)
    runs.run(halves, engine=in_turn(1), **CHANGES)
    assert_equal_runs(one, halves, but=("manifest.json",))


def test_more_steps_or_another_distance_are_recorded(tmp_path: Path) -> None:
    """The run goes on: first with what it has, then by the new plan; and says that it is another."""
    run = runs.run(tmp_path / "run", Interrupting(at=2), engine=in_turn(2), **CHANGES)
    lines: list[str] = []
    console = Console(quiet=True)
    console.warn = lambda text, **_: lines.append(text)  # type: ignore[method-assign]
    runs.run(run, console, engine=in_turn(1), **CHANGES, steps=8)
    assert versions(run) == [0, 0, 0, 1, 3, 4, 5, 6]
    [said] = [line for line in lines if "engine.ahead" in line]
    assert "engine.ahead was 2 and is 1" in said and "steps was 6 and is 8" in said


def test_killed_at_random_it_ends_as_if_nothing_had_happened(shell: Shell, tmp_path: Path) -> None:
    recipe = runs.write(tmp_path / "recipe.yaml", engine=in_turn(3), **CHANGES, steps=14)
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    assert shell.run("train", recipe, f"out={whole}") == 0, shell.said
    kills = 0
    for kill in range(3):
        shell.start("train", recipe, f"out={killed}")
        goal = newest_step(killed) + moments.randint(1, 4)
        while newest_step(killed) < min(goal, 12) and Path(f"/proc/{shell.process}/exe").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(shell.process, signal.SIGKILL)
        kills += shell.wait() == -signal.SIGKILL
        assert kills == kill + 1, shell.said
    assert shell.run("train", recipe, f"out={killed}") == 0, shell.said
    assert_equal_runs(whole, killed)


def assert_stopping_changes_nothing(group: Group, whole: Path) -> None:
    """Two ranks that are interrupted after a checkpoint and resumed end as the whole run of the same recipe did."""
    stopped, recipe = whole.with_name("stopped"), whole.with_suffix(".yaml")
    group.start(2, ["train", str(recipe), f"out={stopped}"])
    while not [*stopped.glob("checkpoints/stage-0-*")]:
        time.sleep(0.01)
    os.kill(group.processes[1], signal.SIGINT)
    assert group.wait() == [130, 130], group.said() + group.said(1)
    assert group.run(2, ["train", str(recipe), f"out={stopped}"]) == [0, 0], group.said()
    assert_equal_runs(whole, stopped)


def test_two_ranks_stop_and_go_on(group: Group, tmp_path: Path) -> None:
    """Each has sampled its share ahead; all of it is in the checkpoint."""
    whole = launched(group, tmp_path / "whole", engine=in_turn(2), **CHANGES, steps=8)
    assert_stopping_changes_nothing(group, whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"engine": {"ahead": 2}}, r"engine\.ahead: .* older weights, which grpo does not correct for as it is"),
        ({"engine": {"ahead": 9}}, r"engine\.ahead.* 9"),
        ({"engine": {"ahead": 2}, "algorithm": {"name": "replay", "group_size": 4}}, r"which replay does not correct"),
        (
            {"engine": {"name": "vllm", "address": "http://127.0.0.1:8000", "ahead": 2}, "algorithm": CAPPED},
            r"engine\.ahead is 2, and vllm holds one version of the weights; write ahead: 1, or name: pool",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(runs.tiny(**changes))
