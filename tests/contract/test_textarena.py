"""TextArena's games, with the library itself where it is installed."""

import random

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.check import check_env
from lmgym.types import Example

GAME = Example("game/0", "a game")
MOVES = ["[4]", "[0]", "[1]", "[7]", "[2]", "[6]", "nonsense", "[8]"]


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from lmgym.envs.textarena import TextArena

    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(LmgymError, match=r"pip install 'lmgym\[textarena\]'"):
        TextArena(id="TicTacToe-v0")


def test_two_players_read_what_is_new_to_them() -> None:
    pytest.importorskip("textarena")
    from lmgym.envs.textarena import TextArena

    env = TextArena(id="TicTacToe-v0")
    first = env.reset(GAME, seed=5)[0]["content"]
    assert env.first == 0 and "You are Player 0" in first
    step = env.step("[4]", "eos")
    assert step.player == 1 and "You are Player 1" in step.messages[0]["content"]
    assert "[Player 0] [4]" in step.messages[0]["content"]
    again = env.step("nonsense", "eos")
    assert again.player == 1 and "invalid move" in again.messages[0]["content"]
    assert "nonsense" not in again.messages[0]["content"]  # his own words he knows
    over = env.step("nonsense", "eos")
    assert over.terminated and over.reward == -1.0 and over.others == {0: 1.0}


def test_games_side_by_side_have_random_numbers_of_their_own() -> None:
    pytest.importorskip("textarena")
    from lmgym.envs.textarena import TextArena

    def alone(seed: int) -> list[str]:
        env = TextArena(id="2048-v0", players=1)
        said = [env.reset(GAME, seed)[0]["content"]]
        return [*said, *(env.step(move, "eos").messages[0]["content"] for move in ("[Left]", "[Up]", "[Right]"))]

    outside = random.getstate()
    envs = [TextArena(id="2048-v0", players=1) for _ in range(2)]
    said = [[env.reset(GAME, seed)[0]["content"]] for seed, env in enumerate(envs)]
    for move in ("[Left]", "[Up]", "[Right]"):
        for own, env in zip(said, envs, strict=True):
            own.append(env.step(move, "eos").messages[0]["content"])
    assert said == [alone(0), alone(1)] and random.getstate() == outside


def test_it_keeps_the_contract() -> None:
    pytest.importorskip("textarena")
    check_env("textarena", id="TicTacToe-v0", texts=MOVES)
    check_env("textarena", id="TicTacToe-v0", opponent="current")
    check_env("textarena", id="2048-v0", players=1)


def test_bad_input_in_one_sentence() -> None:
    pytest.importorskip("textarena")
    from lmgym.envs.textarena import TextArena

    with pytest.raises(LmgymError, match=r"TextArena has no 'TicTacTo-v0'; did you mean 'TicTacToe-v0'\?"):
        TextArena(id="TicTacTo-v0")
    with pytest.raises(LmgymError, match=r"env\.players"):
        TextArena(id="TicTacToe-v0", players=3).reset(GAME, 0)
