"""The short form of `python -m tests.torture hangs`: some of the worst kinds of hang against each limit."""

import time

import pytest

from tests.torture.hangs import ALLOWED, LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("kind", ["swallow", "iterate", "library", "block", "stop", "stop_parent", "close"])
@pytest.mark.parametrize("limit", ["reward", "env.step"])
def test_whatever_hangs_is_over_within_its_limit(limit: str, kind: str) -> None:
    began = time.monotonic()
    outcome = LIMITS[limit].run(kind)
    assert "did not" in outcome or "process" in outcome, outcome
    assert time.monotonic() - began < LIMITS[limit].seconds + ALLOWED + 60  # 60 s for a busy machine to start processes
