"""The short form of tests/torture/phases.py: a run that is ended in some of its phases ends as if it had not been."""

import random
from pathlib import Path

import pytest

from tests.ranks import Group
from tests.torture.phases import RECIPES, campaign

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_kills_and_stops_in_some_phases_change_nothing(tmp_path: Path) -> None:
    group = Group(tmp_path, "import tests.torture.phases")
    tally = campaign(RECIPES["early stop"], group, 1, 6, random.Random(0), tmp_path)
    group.close()
    assert not tally.failures and sum(tally.kills.values()) >= 6 and tally.ends
