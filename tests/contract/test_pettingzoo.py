"""PettingZoo's games for players who move in turn: what is said reaches them, and each gets what the game pays."""

from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.check import check_env
from lmgym.envs.pettingzoo import PettingZoo
from lmgym.types import Example
from tests import runs

pytest.importorskip("pettingzoo.classic.tictactoe_v3")
GAME = Example("game/0", "a game")
FIELDS = "{player}: {actions}"


def game(**changes: Any) -> PettingZoo:
    return PettingZoo(**{"id": "classic.tictactoe_v3", "show": FIELDS} | changes)


def test_two_players_move_in_turn_and_are_paid_apart() -> None:
    env = game()
    assert env.reset(GAME, seed=0)[-1]["content"] == "player_1: 0, 1, 2, 3, 4, 5, 6, 7, 8"
    second = env.step("0", "eos")
    assert second.player == 1 and not second.restart  # the second player's own first prompt
    assert second.messages[-1]["content"] == "player_2: 1, 2, 3, 4, 5, 6, 7, 8"
    third = env.step("1", "eos")
    assert third.player == 0 and third.restart and third.messages[-1]["content"] == "player_1: 2, 3, 4, 5, 6, 7, 8"
    for move in ("3", "4"):
        assert env.step(move, "eos").reward == 0
    over = env.step("6", "eos")  # the first column
    assert over.terminated and over.reward == 1.0 and over.others == {1: -1.0}


def test_an_illegal_move_loses_at_once() -> None:
    env = game()
    env.reset(GAME, seed=0)
    env.step("0", "eos")
    for text in ("0", "none", "9"):
        env = game()
        env.reset(GAME, seed=0)
        env.step("0", "eos")
        lost = env.step(text, "eos")
        assert lost.terminated and lost.reward == -1.0 and not lost.others and lost.info["invalid"] == 1.0


def test_against_chance() -> None:
    """The policy plays one side, drawn by the seed; the game is a function of seed and moves."""
    totals = set()
    for seed in range(12):
        env, again = game(opponent="random"), game(opponent="random")
        seed = seed + (seed % 2) * 2**32
        first = env.reset(GAME, seed)
        assert first == again.reset(GAME, seed) and env.players == 1
        assert first[-1]["content"].startswith(("player_1", "player_2")[seed // 2**32 % 2])
        total = 0.0
        for _ in range(9):
            move = env.demonstrate()
            step = env.step(move, "eos")
            assert step == again.step(move, "eos") and step.player is None
            total += step.reward
            if step.over:
                break
        assert step.terminated
        totals.add(total)
    assert totals <= {1.0, 0.0, -1.0} and len(totals) > 1


def test_conversations() -> None:
    env = game(memory="conversation", max_turns=3)
    env.reset(GAME, seed=0)
    assert not env.step("0", "eos").restart
    assert not env.step("1", "eos").restart
    assert env.step("2", "eos").truncated


def test_it_keeps_the_contract() -> None:
    check_env("pettingzoo", id="classic.tictactoe_v3", opponent="random")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"id": "classic.chequers_v1"}, "no module 'pettingzoo.classic.chequers_v1'"), ({"show": "{x}"}, "no 'x'"),
     ({"arguments": {"size": 4}}, "cannot be made")],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        game(**changes).reset(GAME, seed=0)


@pytest.mark.parametrize("opponent", ["self", "frozen", "random"])
def test_a_run(opponent: str, tmp_path: Path) -> None:
    env = {"name": "pettingzoo", "id": "classic.tictactoe_v3", "opponent": opponent, "workers": 0}
    runs.run(tmp_path / "run", env=env, rewards=None, task="episodes", steps=2)
    records = [one for one in runs.records(tmp_path / "run/metrics.jsonl") if one["kind"] == "train"]
    assert len(records) == 2 and all(one["environment/invalid"] > 0 for one in records)
