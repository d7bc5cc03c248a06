"""Win rates of `lmgym compare --judge`: by hand, of judges with and without a bias for a place."""

import json
from pathlib import Path

import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.experiments.win_rates import WinRates, read_judge, win_rates
from lmgym.types import Episode, Example, Turn
from tests import learned_models as tiny
from tests import runs
from tests.runs import complaint

LONGER = "tests.contract.group_rewards:longer"


def answers(*groups: list[str]) -> list[list[Episode]]:
    return [
        [Episode(Example(f"a/{n}", "?", ("unused",)), n, 0, [Turn([1], [2], text=text)]) for text in group]
        for n, group in enumerate(groups)
    ]


def rates(judge: str, first: list[list[str]], second: list[list[str]]) -> WinRates:
    return win_rates(read_judge(judge), answers(*first), answers(*second))


def means(found: WinRates) -> list[float]:
    return [found.second_wins.mean, found.shown_first_wins.mean, found.orders_agree.mean]


def test_win_rates_by_hand() -> None:
    """The judge likes what is longer; equal answers tie, and say nothing of places."""
    found = rates(f'"{LONGER}": {{}}', [["aa", "a"], ["aaa", "b"]], [["a", "aa"], ["aaa", "bb"]])
    assert means(found) == [0.5 * (0.5 + 0.75), 0.5, 1.0]  # the prompt is the unit: (0 + 1) / 2 and (1/2 + 1) / 2
    assert (found.pairs, found.equal, found.unjudged) == (4, 1, 0)
    assert means(rates(f'"{LONGER}": {{}}', [["a"]], [["a"]]))[0] == 0.5
    assert found.second_wins.low < 0.625 < found.second_wins.high
    swapped = rates(f'"{LONGER}": {{}}', [["a", "aa"], ["aaa", "bb"]], [["aa", "a"], ["aaa", "b"]])
    assert swapped.second_wins.mean == 1 - found.second_wins.mean


def test_a_bias_for_the_first_place_moves_no_win_rate() -> None:
    """Half of each verdict is "the first one"; where nothing is longer all of it is."""
    found = rates(f'"{LONGER}": {{bias: 0.5}}', [["a"], ["aa"], ["b"]], [["aa"], ["aaa"], ["c"]])
    assert found.second_wins.mean == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    assert found.shown_first_wins.mean == pytest.approx((0.75 + 0.75 + 1) / 3) and found.orders_agree.mean == 0.0
    unsure = rates(f'"{LONGER}": {{unsure: true}}', [["x"], ["a"]], [["yy"], ["bb"]])
    assert unsure.unjudged == 1 and unsure.second_wins.mean == 1.0
    with pytest.raises(LmgymError, match="the judge has judged no pair: it gave no verdict"):
        rates(f'"{LONGER}": {{unsure: true}}', [["x"]], [["yy"]])


@pytest.mark.slow
def test_the_command_asks_a_local_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The judge says A with 3/4 to everything: no model wins, and the first place does."""
    folder = tiny.constant(tmp_path / "judge", {"A": 1.0986123, "B": 0.0})
    recipe = runs.write(tmp_path / "a.yaml")
    policy = {**runs.TINY["policy"], "architecture": {**runs.ARCHITECTURE, "hidden_size": 32}}
    other = runs.write(tmp_path / "b.yaml", policy=policy)
    path = tmp_path / "result.json"
    judge = f"judge_pairs: {{model: {folder}}}"
    assert (
        main(["compare", str(recipe), str(other), "evaluation.temperature=1", "--judge", judge, "--json", str(path)])
        == 0
    )
    judged = json.loads(path.read_text())["judged"]
    assert judged["second_wins"]["mean"] == pytest.approx(0.5, abs=1e-5)
    assert judged["shown_first_wins"]["mean"] == pytest.approx(0.75, abs=1e-5)
    assert judged["pairs"] == 8 and judged["equal"] < 8
    assert "the one shown first wins   0.750 [" in capsys.readouterr().out
    for given, told in (
        ("judge_pairs", "--judge is 'judge_pairs'; write 'NAME: {model: ...}', where NAME is judge_pairs"),
        ("{", "--judge is '{'; write"),
        ("length: {target: 3}", "--judge names 'length', which does not compare with the reference"),
        ("judge_pairs: {model: x, order: first}", "--judge: 'order' has no effect on a win rate"),
        ("judge_pairs: {}", "key 'rewards.judge_pairs.model' is missing"),
        (f"judge_pairs: {{model: {tmp_path}/none}}", f"there is no model folder {tmp_path}/none"),
    ):
        assert told in complaint(capsys, "compare", recipe, other, "--judge", given)
