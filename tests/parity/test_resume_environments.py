"""Runs on environments: a resumed one is the uninterrupted one, frozen opponents and processes included."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.parity.test_resume import Interrupting
from tests.runs import assert_equal_runs

NUMBERS = {
    "model": "builtin:tiny_gpt2",
    "tokenizer": "builtin:numbers",
    "device": "cpu",
    "architecture": {"n_embd": 16},
}
GAMES: dict[str, dict[str, Any]] = {
    "against itself": {"name": "tic_tac_toe", "style": "numbers", "opponent": "self"},
    "against a frozen copy": {"name": "tic_tac_toe", "style": "numbers", "opponent": "frozen"},
    "in processes": {"name": "tic_tac_toe", "style": "numbers", "opponent": "random", "workers": 1},
    "a conversation": {"name": "guess_number", "style": "numbers", "high": 9, "guesses": 3},
    "gymnasium": {"name": "gymnasium", "id": "FrozenLake-v1", "max_turns": 5, "workers": 0, "on_invalid": "random"},
}
ALGORITHMS = {
    "gymnasium": {"name": "ppo", "epochs": 2, "discount_per": "turn", "gamma": 0.9, "bootstrap": True},
    "a conversation": {"name": "reinforce_stable", "baseline": "batch", "group_size": 2},
}
WARM = {"name": "warm", "algorithm": "supervised", "steps": 6}

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("game", GAMES)
def test_a_run_that_was_stopped_and_resumed_is_the_whole_one(game: str, tmp_path: Path) -> None:
    """Six of demonstrations, four of play; stopped in the second, with what it was begun with still frozen."""
    changes: dict[str, Any] = {
        "env": GAMES[game],
        "task": None,
        "rewards": {},
        "policy": NUMBERS,
        "sampling": {"max_new_tokens": 1},
        "optimizer": {"learning_rate": 0.02, "warmup": 0},
        "evaluation": {"every": 3, "examples": 4, "env": {**GAMES[game], "workers": 0}},
        "stages": [WARM, {"name": "rl", "steps": 4}],
        "algorithm": ALGORITHMS.get(game, {"name": "rloo", "group_size": 4}),
    }
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=8), **changes)
    if game == "against a frozen copy":
        assert runs.state(halves)["copies"] == {"opponent": 0}
    runs.run(halves, **changes)
    assert_equal_runs(whole, halves)
    steps = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    assert any(record["gradient_norm"] > 0 for record in steps if record["stage"] == 1)
