"""A resumed run is the run that was not interrupted, where GRPO's family has more to remember or to read than a batch:
groups that were drawn and rejected, an adapted coefficient, parts of the score."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

pytestmark = [pytest.mark.slow]

ONE_BIT = {"regex": {"pattern": "[0-9]"}}  # 0 or 1, and so many groups of two whose answers earn the same
CASES: dict[str, dict[str, Any]] = {
    "dynamic sampling": {"algorithm": {"name": "dapo", "group_size": 2, "minibatches": 2}, "rewards": ONE_BIT},
    "an adaptive penalty": {
        "algorithm": {"name": "gspo", "group_size": 4, "kl_coefficient": 0.1, "kl_target": 0.01, "mask_truncated": True}
    },
    "parts": {
        "algorithm": {
            "name": "grpo",
            "group_size": 4,
            "credit": "each_reward",
            "correction": {"name": "truncated", "cap": 1.0},
        }
    },
    "replay of a member": {
        "algorithm": {"name": "replay", "preset": "dapo", "group_size": 2, "minibatches": 1, "replayed": 3},
        "rewards": ONE_BIT,
        "logs": {"rollouts": "all"},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_three_steps_and_three_more_equal_six(name: str, tmp_path: Path) -> None:
    changes = CASES[name]
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **changes)
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    trained = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(6))
    assert any(record["gradient_norm"] > 0 for record in trained)
    if "kl_target" in changes["algorithm"]:
        assert runs.algorithm_state(whole)["beta"] != changes["algorithm"]["kl_coefficient"]
    if name == "dynamic sampling":
        assert any(record["selected"] < 1 for record in trained)  # equality proves little where nothing is rejected


def test_a_step_draws_again_until_it_has_enough_groups(tmp_path: Path) -> None:
    """Four groups of two train, of those that up to four draws of four bring."""
    folder = runs.run(tmp_path / "run", **CASES["dynamic sampling"], steps=3, logs={"rollouts": "all"})
    answers = [answer for answer in runs.records(folder / "rollouts.jsonl") if answer["kind"] == "train"]
    for record in [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]:
        groups: dict[int, list[dict[str, Any]]] = {}
        for answer in answers:
            if answer["step"] == record["step"]:
                groups.setdefault(answer["group"], []).append(answer)
        assert len(groups) % 4 == 0 and all(len(group) == 2 for group in groups.values())
        mixed = sum(len({answer["score"] for answer in group}) > 1 for group in groups.values())
        assert mixed >= 4 or len(groups) == 16
        assert record["selected"] == min(mixed, 4) / len(groups)
        assert record["zero_variance_groups"] == pytest.approx(1 - mixed / len(groups))


def test_where_no_group_differs_a_step_moves_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    """A task that is solved, or hopeless: four draws of four prompts, of which one group stands in for the batch."""
    never = {"regex": {"pattern": "^never$"}}
    folder = runs.run(tmp_path / "run", algorithm={"name": "dapo", "group_size": 2}, rewards=never, steps=2)
    for record in [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]:
        assert record["zero_variance_groups"] == 1 and record["selected"] == 1 / 16
        assert record["gradient_norm"] == 0 == record["rows/computed"]
