"""Rewards for some examples only (`where`), answers without an end, rewards that never pay, neighbours of plug-ins."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.core.registry import load_plugin
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import why_never_paid
from lmgym.types import Episode, Example, Turn
from tests import runs


def answer(text: str, source: str, stop: str = "eos") -> Episode:
    meta = {"data_source": source, "level": 3}
    return Episode(Example(f"{source}/0", "2+2=", ("4",), meta), 0, 0, [Turn([1], [3], text=text, stop=stop)])


def test_where_chooses_examples_by_their_columns() -> None:
    """As verl's managers choose a score by data_source; other examples get 0 and are not shown to the function."""
    section = {"where": {"data_source": ["gsm8k", "svamp"], "level": 3}}
    [reward] = build_rewards({"exact_match": section})
    episodes = [answer("4", "gsm8k"), answer("4", "math"), answer("5", "svamp")]
    assert reward.selective and call_reward(reward, episodes) == [1.0, 0.0, 0.0]
    assert not build_rewards({"exact_match": 1.0})[0].selective
    [wrong] = build_rewards({"exact_match": {"where": {"data_sorce": "gsm8k"}}})
    with pytest.raises(LmgymError, match=r"where': 'gsm8k/0' has no column 'data_sorce'; did you mean 'data_source'"):
        call_reward(wrong, episodes)


def test_an_answer_without_an_end_is_counted() -> None:
    """TRL: `scores[~contains_eos] -= missing_eos_penalty`."""
    [reward] = build_rewards({"missing_eos": -0.5})
    episodes = [answer("4", "a", stop) for stop in ("eos", "length", "context", "stop")]
    assert call_reward(reward, episodes) == [0.0, 1.0, 1.0, 1.0]


def test_a_plugin_finds_the_modules_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "board_of_mine.py").write_text("SIZE = 3\n")
    (folder / "game_of_mine.py").write_text("from board_of_mine import SIZE\n")
    load_plugin(str(folder / "game_of_mine.py"))
    assert sys.modules["lmgym_plugin_game_of_mine"].SIZE == 3
    (folder / "lost.py").write_text("import nowhere_at_all\n")
    told = rf"plugins: .*lost.py: there is no module 'nowhere_at_all' \(looked in {folder} and the current folder too\)"
    with pytest.raises(LmgymError, match=told):
        load_plugin(str(folder / "lost.py"))


# A reward that never pays


def chats(completions: list[Any], **columns: Any) -> list[float]:
    return [float("#" in completion) for completion in completions]  # of a list of messages always false


def swallows(completions: list[Any], **columns: Any) -> list[float]:
    """As mini-R1's functions: whatever goes wrong is worth 0."""
    values = []
    for completion in completions:
        try:
            values.append(float(re.match(r"<think>.*", "<think>" + completion) is not None))
        except Exception:
            values.append(0.0)
    return values


def finds_nothing(completions: list[Any], **columns: Any) -> list[float]:
    values = []
    for completion in completions:
        try:
            values.append(float(re.search(r"<answer>(\d+)</answer>", completion).group(1)))  # type: ignore[union-attr]
        except AttributeError:
            values.append(0.0)
    return values


def test_why_a_reward_never_pays() -> None:
    asked = [{"role": "user", "content": "2+2="}]
    texts = [answer("# 4", "a"), answer("5", "a")]
    messages = [replace(one, example=replace(one.example, prompt=asked)) for one in texts]
    here = "tests.contract.test_reward_selection"
    told = {}
    for name in ("chats", "swallows", "finds_nothing"):
        [reward] = build_rewards({f"{here}:{name}": {"pool": False}})
        assert call_reward(reward, messages if name != "finds_nothing" else texts) == [0.0, 0.0]
        told[name] = why_never_paid(reward, messages if name != "finds_nothing" else texts)
    line = swallows.__code__.co_firstlineno + 5
    concatenates = 'can only concatenate str (not "list") to str'
    assert told == {
        "chats": "it pays some of them if it gets texts: completions are lists of messages here, since prompts are; "
        "read completion[0]['content']",
        "swallows": f"the function has caught TypeError: {concatenates} (test_reward_selection.py, line {line})",
        "finds_nothing": "",
    }
    assert why_never_paid(build_rewards({"exact_match": 1.0})[0], texts) == ""


@pytest.mark.slow
def test_check_says_which_rewards_never_paid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {"exact_match": 1.0, "tests.contract.test_reward_selection:swallows": 1.0}
    recipe = runs.write(tmp_path / "recipe.yaml", rewards=rewards, task={**runs.TINY["task"], "prompts": "chat"})
    assert main(["check", str(recipe)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^  reward 'exact_match' was 0 for all \d+ answers$", said, re.MULTILINE)
    caught = r"^! reward '.*swallows' was 0 for all \d+ answers, and the function has caught TypeError"
    assert re.search(caught, said, re.MULTILINE)
