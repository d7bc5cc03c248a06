"""When a run gives its engine new weights: before answers are asked for, and only then."""

from pathlib import Path

import pytest

from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from tests import runs
from tests.parity.test_resume import RL, WARM


@pytest.mark.slow
def test_a_stage_that_samples_nothing_sends_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three supervised steps, four of GRPO; each stage is evaluated when it begins and when it ends."""
    loaded: list[int] = []
    load = Sampler.load

    def counted(sampler: Sampler, policy: Policy, version: int) -> None:
        loaded.append(version)
        load(sampler, policy, version)

    monkeypatch.setattr(Sampler, "load", counted)
    runs.run(tmp_path / "run", stages=[WARM, RL], evaluation={"every": 0, "examples": 8})
    assert loaded == [0, 3, 4, 5, 6, 7]
