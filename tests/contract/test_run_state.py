"""Why a run stopped early, as summary.json has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmgym.logs.run_state import early_stop, run_state


@pytest.mark.parametrize(
    ("rule", "best", "said"),
    [
        ({"metric": "reward", "mode": "max", "target": 0.9, "patience": None}, 0.93, "reward reached 0.9"),
        ({"metric": "length/mean", "mode": "min", "target": 20.0, "patience": 3}, -19.0, "length/mean reached 20"),
        ({"metric": "length/mean", "mode": "min", "target": 20.0, "patience": 3}, -21.0, "did not improve 3 times"),
        ({"metric": "reward", "mode": "max", "target": None, "patience": 2}, 0.5, "reward did not improve 2 times"),
        ({"metric": "reward", "mode": "max", "target": None, "patience": "x"}, 0.5, None),
        ({"metric": "reward"}, 0.5, None),
        (None, 0.5, None),
        ([1], 0.5, None),
    ],
)
def test_the_reason_of_an_early_stop(tmp_path: Path, rule: Any, best: float, said: str | None) -> None:
    assert early_stop(tmp_path) is None
    (tmp_path / "summary.json").write_text(json.dumps({"stop": rule, "early_best": best}))
    told = early_stop(tmp_path)
    assert told is None if said is None else told is not None and told.endswith(said)


@pytest.mark.parametrize(
    ("after", "stop", "state"),
    [
        ({"stage": "rl", "step": 12}, None, "finished"),
        ({"stage": "rl", "step": 9}, None, "unfinished"),
        ({"stage": "more", "step": 0}, {"metric": "reward"}, "finished"),  # its first evaluation stopped the last stage
        ({"stage": "more", "step": 0}, None, "unfinished"),
        ({"stage": "more", "step": 3}, {"metric": "reward"}, "unfinished"),
    ],
)
def test_a_run_is_finished_if_its_summary_is_about_its_last_step(
    tmp_path: Path, after: dict[str, Any], stop: Any, state: str
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"after": after, "stop": stop}))
    assert run_state(tmp_path, "rl", 12) == state
