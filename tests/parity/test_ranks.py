"""Several processes train one run: the same gradients as one process, the same bits in every launch."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmgym.rewards.champions import Champions
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.contract import test_champions as champions
from tests.parity.test_resume import ALGORITHMS
from tests.ranks import NEAR, Group, assert_equal_updates, written
from tests.runs import assert_equal_runs

pytestmark = pytest.mark.slow
SIZE = 3  # ranks: few batches can be cut evenly among them


@pytest.fixture(scope="module")
def updates(
    group: Group,
    alone: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, Path]:
    """What `rank_targets.gradients` wrote, by the number of ranks."""
    return {1: alone, SIZE: written(group, tmp_path_factory.mktemp("ranks"), SIZE)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_do_not_depend_on_the_number_of_ranks(name: str, updates: dict[int, Path]) -> None:
    assert_equal_updates(name, updates[1], updates[SIZE], SIZE)


def test_trpo_finds_the_same_gradient_and_product(updates: dict[int, Path]) -> None:
    """Of the policy; what the test above compares is the critic's."""
    expected, first = (load_file(updates[number] / "trpo policy-0.safetensors") for number in (1, SIZE))
    for name, own in expected.items():
        assert float(own.norm()) > 0
        assert float((first[name] - own).double().norm() / own.double().norm()) < NEAR
        for rank in range(1, SIZE):
            assert torch.equal(load_file(updates[SIZE] / f"trpo policy-{rank}.safetensors")[name], first[name])


def launched(group: Group, folder: Path, size: int = 2, **changes: object) -> Path:
    recipe = runs.write(folder.with_suffix(".yaml"), **{"algorithm": {"name": "ppo", "epochs": 2}, **changes})
    assert group.run(size, ["train", str(recipe), f"out={folder}"]) == [0] * size, group.said() + group.said(1)
    return folder


def test_two_launches_are_equal_bit_for_bit(group: Group, tmp_path: Path) -> None:
    assert_equal_runs(launched(group, tmp_path / "a"), launched(group, tmp_path / "b"))


def test_the_first_rollout_is_that_of_one_process(group: Group, tmp_path: Path) -> None:
    """Random numbers belong to the episode, not to the rank that plays it."""
    changes = {"logs": {"rollouts": "all", "samples": 2}, "steps": 1}
    one = runs.run(tmp_path / "one", algorithm={"name": "ppo", "epochs": 2}, **changes)
    ours = [runs.records(folder / "rollouts.jsonl") for folder in (one, launched(group, tmp_path / "two", **changes))]
    sampled = [[[turn["action_ids"] for turn in record["turns"]] for record in records] for records in ours]
    assert sampled[0] == sampled[1]
    assert [record["score"] for record in ours[0]] == [record["score"] for record in ours[1]]


def test_a_killed_rank_ends_the_others_and_a_new_group_goes_on(group: Group, tmp_path: Path) -> None:
    whole = launched(group, tmp_path / "whole", checkpoint={"every": 1, "keep": 2}, steps=8)
    recipe, folder = tmp_path / "whole.yaml", tmp_path / "killed"
    for victim in (1, 0):
        group.start(2, ["train", str(recipe), f"out={folder}"])
        saved = {*folder.glob("checkpoints/stage*")}
        while not {*folder.glob("checkpoints/stage*")} - saved:
            time.sleep(0.02)
        os.kill(group.processes[victim], signal.SIGKILL)
        statuses = group.wait()
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 75, statuses
        # Noticed at once: after half an hour, the limit of a wait, it would say "no answer within".
        assert f"lost the connection to rank {victim}" in group.said(1 - victim)
    assert group.run(2, ["train", str(recipe), f"out={folder}"]) == [0, 0]
    assert_equal_runs(whole, folder)


def test_a_run_goes_on_with_another_number_of_ranks(group: Group, tmp_path: Path) -> None:
    """Its records say that it is no longer bit for bit what it would have been."""
    folder = launched(group, tmp_path / "two", steps=3)
    runs.run(folder, algorithm={"name": "ppo", "epochs": 2}, steps=6)
    records = runs.records(folder / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(6))
    [resumed] = [record for record in records if record["kind"] == "resume"]
    assert "ranks" in json.dumps(resumed)


def test_ranks_have_the_same_champions(group: Group, tmp_path: Path) -> None:
    """Each reward of both ranks' answers is what it must be, given all the answers of the steps before."""
    recipe = runs.write(tmp_path / "recipe.yaml", **champions.FEW, logs={"rollouts": "all"}, steps=4)
    assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'run'}"]) == [0, 0], group.said() + group.said(1)
    records = [one for one in runs.records(tmp_path / "run/rollouts.jsonl") if one["kind"] == "train"]
    known, compared = {champions.HERE: Champions()}, 0
    for step in range(4):
        own = [one for one in records if one["step"] == step]
        examples = [Example(one["example"], "?") for one in own]
        turns = [[Turn([1], [2], text=turn["text"]) for turn in one["turns"]] for one in own]
        shown = [Episode(examples[n], one["group"], n, turns[n]) for n, one in enumerate(own)]
        compared += sum(example.id in known[champions.HERE].seats for example in examples)
        found = champions.judged(shown, known, champions.reward())
        assert found == [one["reward_components"]["best/raw"] for one in own]
    assert compared > 16
    saved = json.loads((runs.newest(tmp_path / "run") / "champions.json").read_text())
    assert list(saved["best"].items()) == list(known[champions.HERE].seats.items())


def test_ctrl_c_stops_all_ranks_after_the_same_step(group: Group, tmp_path: Path) -> None:
    whole = launched(group, tmp_path / "whole", checkpoint={"every": 1, "keep": 2}, steps=12)
    folder = tmp_path / "stopped"
    group.start(2, ["train", str(tmp_path / "whole.yaml"), f"out={folder}"])
    while not [*folder.glob("checkpoints/stage-0-*")]:
        time.sleep(0.02)
    os.kill(group.processes[1], signal.SIGINT)  # one rank is told, all stop
    assert group.wait() == [130, 130], group.said() + group.said(1)
    assert not (folder / "final").exists()
    assert group.run(2, ["train", str(tmp_path / "whole.yaml"), f"out={folder}"]) == [0, 0]
    assert_equal_runs(whole, folder)


def test_a_rank_that_goes_while_they_join_is_a_lost_rank(group: Group, tmp_path: Path) -> None:
    """The limit holds, and the status says that it may go better again."""
    assert group.run(2, str(tmp_path), target="tests.rank_targets:left_while_joining") == [0, 9]
    assert float((tmp_path / "seconds").read_text()) < 5 * 2  # torch itself would try for five times two seconds
    recipe = runs.write(tmp_path / "recipe.yaml", distributed={"seconds": 2})
    group.start(2, ["train", str(recipe), f"out={tmp_path / 'run'}"])
    os.kill(group.processes[1], signal.SIGKILL)
    assert group.wait() == [75, -9]
    assert "could not join the others within 2 s" in group.said()


def test_all_ranks_compute_as_the_first_one_has_chosen(group: Group, tmp_path: Path) -> None:
    assert group.run(2, str(tmp_path), target="tests.rank_targets:choices") == [0, 0], group.said() + group.said(1)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first[:2] == ["torch.float32", 1]


def test_an_error_of_one_rank_ends_all(group: Group, tmp_path: Path) -> None:
    """Every environment of the second rank fails; the first one notices that it has gone."""
    changes = {"env": "tests.rank_targets:FailsOnTheSecondRank", "rewards": None, "prompts_per_step": 2}
    recipe = runs.write(tmp_path / "failing.yaml", **{"algorithm": {"name": "rloo", "group_size": 2}, **changes})
    statuses = group.run(2, ["train", str(recipe), f"out={tmp_path / 'run'}"])
    assert statuses == [75, 1], group.said() + group.said(1)
    assert "lost the connection to rank 1" in group.said() and "second rank" in group.said(1)
