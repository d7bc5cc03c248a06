"""What `lmgym check` says of environments: memory and seconds from a few episodes, not from a full context."""

import re
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from tests import runs

GIB = 2**30
MANY = {**runs.ARCHITECTURE, "hidden_size": 64, "max_position_embeddings": 131_072}
GAME: dict[str, Any] = {
    "policy": {"model": "builtin:tiny", "device": "cpu", "architecture": MANY},
    "env": {"name": "gymnasium", "id": "FrozenLake-v1", "agent": "plain", "workers": 0, "max_turns": 3},
    "task": None,
    "rewards": None,
    "algorithm": {"name": "grpo", "group_size": 8},
    "engine": {"rows": 64},
    "prompts_per_step": 8,
}


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **changes: Any) -> str:
    main(["check", str(runs.write(tmp_path / "recipe.yaml", **GAME | changes)), *arguments])
    return capsys.readouterr().out


def gib(text: str) -> float:
    number, unit = text.split()
    return float(number) / (1 if unit == "GiB" else 1024)


@pytest.mark.slow
def test_memory_of_a_game_is_that_of_a_few_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts as long as the context would not fit; the game's do, so a step is timed."""
    monkeypatch.setattr("lmgym.training.planning.memory_report.memory_here", lambda kind: 2 * GIB)
    said = check(tmp_path, capsys)
    found = re.search(
        r"train: (\S+ \S+) at most, on cpu, with prompts of (\d+) tokens and \S+ parameters, from 64", said
    )
    assert found and gib(found[1]) < 2 and int(found[2]) < 1000, said
    worst = re.search(r"if episodes filled the context, it would be (\S+ \S+); env.max_turns \(3\) bounds", said)
    assert worst and gib(worst[1]) > 2
    assert "a step takes about " in said and "does not fit" not in said
    # Without playing, the worst is all that is known.
    said = check(tmp_path, capsys, "--memory")
    alone = re.search(r"train: (\S+ \S+) at most", said)
    assert alone and gib(alone[1]) == pytest.approx(gib(worst[1]), abs=0.5)  # what this process holds has grown
    assert re.search(r"! does not fit: \S+ GiB of 2.00 GiB here; ", said)
    assert "if episodes fill the context; `lmgym check` without --memory plays some; env.max_turns (3) bounds" in said


@pytest.mark.slow
def test_turns_are_counted_in_memory_and_among_what_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """300 characters follow the first prompt, which a task's prompts do not tell. Of an untrained model nearly all
    answers are cut, and yet each episode ends."""
    changes = {
        "env": {"name": "tests.quiz:Talk", "workers": 1},
        "task": runs.TINY["task"],
        "sampling": {"max_new_tokens": 2},
    }
    said = check(tmp_path, capsys, **changes)
    cut = re.search(r"answers cut off at max_new_tokens: (\d+)% of 256; 0% of 64 episodes never came to an end", said)
    assert cut and int(cut[1]) > 90, said
    assert "! answers" not in said
    long, short = (
        memory_of(said),
        memory_of(check(tmp_path, capsys, **changes | {"env": None, "rewards": runs.TINY["rewards"]})),
    )
    assert long > short


def memory_of(said: str) -> float:
    """GiB of the cache of keys and values, the only part that grows with all tokens of a row."""
    row = re.search(r"cache of keys and values +(\S+ \S+)", said)
    assert row, said
    return gib(row[1])
