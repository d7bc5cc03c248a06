"""TextWorld's games, with the package itself where it is installed."""

from pathlib import Path

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.check import check_env
from lmgym.envs.textworld import TextWorld, _command
from lmgym.types import Example


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two rooms and three things: take the key, unlock the safe."""
    textworld = pytest.importorskip("textworld")
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = 3, 2, 3, 2
    options.path = str(tmp_path_factory.mktemp("games") / "small.z8")
    return str(textworld.make(options)[0])


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(LmgymError, match="pip install textworld"):
        TextWorld(game=str(tmp_path / "none.z8"))


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("take key", "take key"),
        ("\n> look \nand then?", "look"),
        ("caf\u00e9\x00 x", "caf x"),
        ("a" * 500, "a" * 100),
        ("Save", ""),
        ("quit now", ""),
        ("\u4e2d", ""),
        ("", ""),
    ],
)
def test_the_game_hears_one_line_of_ascii_and_no_command_to_its_interpreter(text: str, command: str) -> None:
    assert _command(text) == command


def test_a_game_is_played_to_its_end(game: str) -> None:
    env = TextWorld(game=game, commands=True)
    first = env.reset(Example("game/0", "a game"), seed=1)[0]["content"]
    assert "TextWorld" in first and "$$" not in first and "You can: " in first
    earned = 0.0
    for command in ("take latchkey", "\x00", "quit", "unlock safe with latchkey"):
        step = env.step(command, "eos")
        earned += step.reward
        assert step.info["invalid"] == (command in ("\x00", "quit"))
    assert step.terminated and earned == 1.0
    env.close()


def test_it_keeps_the_contract(game: str) -> None:
    check_env("textworld", game=game)
    check_env("textworld", game=game, commands=True, max_turns=3)
    with pytest.raises(LmgymError, match="there is no file"):
        TextWorld(game="nowhere.z8")
