"""The reward watch: tricks on a policy's own best answers while it trains; it changes no number of the run."""

from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.doctor.facts import Facts
from lmgym.logs.doctor.history import History
from lmgym.logs.doctor.rules_reward import reward_hole
from lmgym.rewards.building import build_rewards
from lmgym.rewards.probing.judging import Judging
from lmgym.rewards.probing.own import TRICKS, Tried, correlations, try_tricks
from lmgym.rollouts.rollout import apply_rewards, groups_of
from lmgym.training.reward_watch import told
from lmgym.types import Episode, Example, Turn
from tests import runs

GROUPS = tuple(f"{n} x y" for n in range(9))  # the answers of nine groups: a number and two letters


def scored(section: dict[str, Any], *groups: str) -> tuple[Any, list[list[Episode]]]:
    """A reward, and groups of answers (words of a text) as it has paid them."""
    [reward] = build_rewards(section)
    pairs = [(group, word) for group, text in enumerate(groups) for word in text.split()]
    episodes = [
        Episode(Example(f"a/{group}", f"what is {group}?", (f"#### {group}",)), group, n, [Turn([1], [2], text=word)])
        for n, (group, word) in enumerate(pairs)
    ]
    apply_rewards(episodes, [reward])
    return reward, groups_of(episodes)


def gains(section: dict[str, Any], *groups: str) -> dict[str, Tried]:
    reward, own = scored(section, *groups)
    return {one.trick: one for one in try_tricks(Judging(reward), own, room=400)}


def test_a_reward_of_length_pays_more_for_what_is_longer_and_a_real_one_for_nothing() -> None:
    long = gains({"length": {"unit": "characters", "target": 5000, "pool": False}}, *GROUPS)
    assert long.keys() == TRICKS.keys()
    assert long["longer"].signs == (1,) * 9 and long["longer"].gain == 1.0 and long["longer"].raises
    assert long["empty"].gain <= 0 and not long["empty"].raises
    real = gains({"final_answer": {}}, *GROUPS)  # the number earns 1, and nothing earns more
    assert not any(one.raises or one.gain > 0 for one in real.values())
    assert real["empty"].gain == -1.0


def test_the_pay_of_a_policy_that_has_not_solved_it_is_compared_with_its_own_best() -> None:
    """None of these answers holds a digit; a copy of the question does."""
    found = gains({"regex": {"pattern": "[0-9]", "pool": False}}, *["a b c"] * 9)
    assert {name for name, one in found.items() if one.raises} == {
        "echo", "question and answer", "injection"  # "10 of 10 points"
    }  # fmt: skip
    assert found["longer"].gain == 0.0
    assert gains({"regex": {"pattern": "x", "pool": False}}) == {}


def test_a_reward_of_groups_sees_the_changed_answer_beside_the_group() -> None:
    here = "tests.contract.group_rewards:shortest"
    found = gains({here: {"pool": False}}, "aa bbb cccc", "dd ee f")
    assert found["empty"].signs == (1, 1) and found["longer"].signs == (-1, -1)  # the best is then the shortest still


def test_what_goes_with_the_pay_is_a_correlation_within_groups() -> None:
    """By hand: of lengths in words all are 1; numbers 1, 0, 0 and pay 1, 0, 0 in each group correlate perfectly."""
    reward, groups = scored({"regex": {"pattern": "[0-9]", "pool": False}}, *GROUPS)
    found = correlations(groups, reward.name)
    assert found["numbers"] == pytest.approx(1.0) and "words" not in found and "marks" not in found
    alike = scored({"regex": {"pattern": "[a-z]", "pool": False}}, "a b", "c d")
    assert correlations(alike[1], "regex") == {} and correlations([], "regex") == {}


def test_it_is_told_in_a_sentence() -> None:
    tried = [Tried("longer", (1,) * 15 + (-1,)), Tried("empty", (0,) * 16), Tried("echo", (1, -1) * 8)]
    assert told("judge", tried, {"words": 0.9, "echo": -0.95}) == (
        "reward_watch: 'judge' pays the policy's best answers more with: longer (15 of 16); within groups its pay goes "
        "most with echo (-0.95)"
    )
    assert "none of 2 tricks is proven to raise the pay of 'judge'" in told("judge", tried[1:], {})
    assert told("judge", [], {}) == "reward_watch: 'judge' judged none of the answers"


def test_the_doctor_needs_48_answers_that_agree() -> None:
    def history(*values: float | None) -> History:
        found = History(Facts())
        for step, value in enumerate(values):
            look = {} if value is None else {"watch/a/b/trick/echo": value, "watch/a/b/answers": 16.0}
            found.add_step({"step": step} | look)
        return found

    assert reward_hole(history(1.0, None, 0.9)) is None
    assert reward_hole(history(1.0, 0.9, 0.2, 0.1)) is None  # it was, and is no more
    sign = reward_hole(history(0.0, 0.5, None, 0.4, 0.9))
    assert sign is not None and sign.steps == 3 and sign.value == pytest.approx(0.6)
    assert sign.what.startswith("'a/b' pays the policy's best answers more when they are changed by the trick 'echo'")


def test_the_doctor_reads_no_older_looks_than_it_needs() -> None:
    """Else each step of a long run would cost more than the one before."""

    class Counted(list[float]):
        read = 0

        def __getitem__(self, place: Any) -> Any:
            self.read += 1
            return super().__getitem__(place)

    found = History(Facts())
    for step in range(1000):
        look = {"watch/a/trick/echo": 1.0, "watch/a/answers": 16.0} if step < 500 else {}
        found.add_step({"step": step, "reward": 0.0} | look)
    counts: Any = Counted(found.columns["watch/a/answers"])
    found.columns["watch/a/answers"] = counts
    sign = reward_hole(found)
    assert sign is not None and sign.steps == 3 and counts.read <= 6


@pytest.mark.slow
def test_a_run_that_is_watched_is_the_run_that_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, but for the numbers of the watch itself; and it goes on from a checkpoint as any run."""
    alone = runs.run(tmp_path / "alone", steps=4)
    watched = runs.run(tmp_path / "watched", Console(), steps=4, reward_watch={"every": 2})
    said = capsys.readouterr().out
    for step in (2, 4):
        for name in ("length", "regex"):
            assert any(f"step {step}: reward_watch: " in line and f"'{name}'" in line for line in said.splitlines())
    steps = [one for one in runs.records(watched / "metrics.jsonl") if one["kind"] == "train"]
    numbers = [{name: value for name, value in one.items() if name.startswith("watch/")} for one in steps]
    assert [len(own) > 20 for own in numbers] == [False, True, False, True]
    for name in ("length", "regex"):
        assert [own.pop(f"watch/{name}/answers", 0) for own in numbers] == [0, 4, 0, 4]
    assert all(-1 <= value <= 1 for own in numbers for value in own.values())
    plain = [one for one in runs.records(alone / "metrics.jsonl") if one["kind"] == "train"]
    assert [{k: v for k, v in one.items() if not k.startswith("watch/")} for one in steps] == plain
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (runs.newest(alone) / name).read_bytes() == (runs.newest(watched) / name).read_bytes()
    assert (alone / "rollouts.jsonl").read_bytes() == (watched / "rollouts.jsonl").read_bytes()


def test_what_has_no_answer_of_one_turn_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"reward_watch": {"every": 1}, "env": "stepwise", "steps": 1}
    with pytest.raises(LmgymError, match=r"reward_watch adds tricks to answers of one turn, and stage .* has environ"):
        runs.run(tmp_path / "run", **changes)
    with pytest.raises(LmgymError, match=r"reward_watch\.groups.* with fewer than 9 groups a look can prove nothing"):
        runs.run(tmp_path / "run", reward_watch={"every": 1, "groups": 8})
