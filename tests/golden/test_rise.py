"""How much of a reward's rise comes with what can be counted in the answers (`lmgym audit RUN`)."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.experiments.audit.own_answers import explain_run
from lmgym.experiments.audit.report import rise_notes
from lmgym.experiments.audit.rise import TOGETHER, Answers, explain_rise
from lmgym.rewards.probing.features import FEATURES
from tests import runs


def answers(steps: int, group: int, length: object, value: object, more: object = None) -> Answers:
    """So many groups of one step each; length, value and more are functions of the step and the answer's number."""
    places = [(step, number) for step in range(steps) for number in range(group)]
    features = {"words": [float(length(*one)) for one in places]}  # type: ignore[operator]
    if more is not None:
        features["numbers"] = [float(more(*one)) for one in places]  # type: ignore[operator]
    step = [one for one, _ in places]
    return Answers(step, step, [float(value(*one)) for one in places], features)  # type: ignore[operator]


def test_a_rise_is_split_by_hand() -> None:
    """Value 2 x + 5 step, x = step + 3 number: within groups the slope is 2. From steps 0, 1, 2 to 6, 7, 8 both means
    move by 6 steps: the rise is 2 * 6 + 5 * 6, of which 12 come with x."""
    found = explain_rise(answers(9, 2, lambda s, n: s + 3 * n, lambda s, n: 2 * (s + 3 * n) + 5 * s))
    assert found is not None and found.rise.mean == pytest.approx(42)
    part = found.parts["words"]
    assert (part.first, part.last) == pytest.approx((1 + 1.5, 7 + 1.5))
    assert part.correlation.mean == pytest.approx(1) and part.part.mean == pytest.approx(12)
    assert found.parts[TOGETHER].part.mean == pytest.approx(12)
    assert part.part.low < 12 < part.part.high and list(rise_notes(found)) == []  # 12 of 42 is less than half


def test_marks_are_counted_in_linear_time() -> None:
    text = "# A\n\n - b\n\t* **c**\n-d\nThe answer is \\boxed{1}"
    assert FEATURES["marks"]("", text) == 7  # a heading, two points, two bold marks, an announcement, a box
    assert FEATURES["marks"]("", "a" + "\n" * 1_000_000 + "- b") == 1  # another pattern would take an hour


def test_of_two_features_that_go_together_only_the_one_that_is_paid_explains_the_rise() -> None:
    """Words are paid, and numbers come with them at times: the multiple regression of numpy, by hand."""
    noise = np.random.default_rng(0).normal(size=(30, 8, 2))
    words = lambda s, n: s + noise[s, n, 0]  # noqa: E731
    numbers = lambda s, n: 0.5 * (s + noise[s, n, 0]) + noise[s, n, 1]  # noqa: E731
    given = answers(30, 8, words, lambda s, n: 3 * words(s, n), numbers)
    found = explain_rise(given)
    assert found is not None
    x = np.array([given.features["words"], given.features["numbers"]]).reshape(2, 30, 8)
    centred, y = (x - x.mean(2, keepdims=True)).reshape(2, -1).T, np.array(given.value).reshape(30, 8)
    slopes = np.linalg.lstsq(centred, (y - y.mean(1, keepdims=True)).reshape(-1), rcond=None)[0]
    change = x[:, 20:].mean((1, 2)) - x[:, :10].mean((1, 2))
    assert found.parts[TOGETHER].part.mean == pytest.approx(float(slopes @ change))
    assert slopes == pytest.approx([3, 0]) and found.parts["words"].part.mean == pytest.approx(found.rise.mean)
    [note] = rise_notes(found)
    assert note.startswith("100% of the rise comes with words")


def test_a_reward_that_does_not_look_at_length_has_no_part_of_it() -> None:
    """Lengths and values both rise, each with its own noise: within groups they have nothing to do with each other. A
    95% interval covers 0 in 19 of 20 cases, so 12 of 20 or fewer have a chance of 4e-9."""
    covered = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=(24, 8, 2))
        found = explain_rise(
            answers(24, 8, lambda s, n: s + noise[s, n, 0], lambda s, n: 0.1 * s + noise[s, n, 1])  # noqa: B023
        )
        assert found is not None and found.rise.low > 0
        covered += found.parts["words"].part.low < 0 < found.parts["words"].part.high
    assert covered > 12


def test_too_few_steps_and_equal_groups_say_nothing() -> None:
    assert explain_rise(answers(5, 2, lambda s, n: n, lambda s, n: n)) is None
    assert explain_rise(answers(9, 2, lambda s, n: n, lambda s, n: s)) is None  # no group has anything to tell
    assert explain_rise(answers(9, 2, lambda s, n: n, lambda s, n: 1e200 * n)) is None
    same = explain_rise(answers(9, 2, lambda s, n: s, lambda s, n: s + n))  # a feature that is the same in each group
    assert same is not None and same.parts["words"].part.mean == 0


@pytest.mark.parametrize(
    ("feature", "text", "count"),
    [
        ("words", "a b\n c", 3), ("lines", "a\n\nb ", 2), ("numbers", "1,234 and 5.6, 7", 3), ("echo", "the Cat", 0.5),
        ("marks", "# A\n- b\n\\boxed{3} #### 3 <answer> **x**", 7), ("repetition", "a b a b a b", 3 / 5),
        ("praise", "Great! I am sure it is correct.", 3), ("words", "", 0), ("repetition", "a", 0), ("echo", "", 0),
    ],
)  # fmt: skip
def test_features_by_hand(feature: str, text: str, count: float) -> None:
    assert FEATURES[feature]("the cat on mats", text) == pytest.approx(count)


def counted(texts: list[str], examples: list[object]) -> list[float]:
    """A reward that pays for each word."""
    return [float(len(text.split())) for text in texts]


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_is_told_what_its_answers_were_paid_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.run(
        tmp_path / "run", algorithm={"name": "grpo", "group_size": 4}, steps=8, sampling={"max_new_tokens": 12},
        rewards={"tests.golden.test_rise:counted": 1.0},
    )  # fmt: skip
    found = explain_run(folder)
    [(name, rise)] = found.items()
    part = rise.parts["words"]
    assert rise.steps == 8 and part.correlation.mean == pytest.approx(1)
    assert part.part.mean == pytest.approx(rise.rise.mean)
    assert main(["audit", str(folder), "--examples", "4", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)["own_answers"]
    assert tree[name]["rise"]["mean"] == pytest.approx(rise.rise.mean)
    assert main(["audit", str(folder), "--examples", "4"]) == 0
    assert f"{name}: what the run's own answers were paid for" in capsys.readouterr().out
    shard = folder / "traces/stage-0-step-000002.zip"
    with zipfile.ZipFile(shard) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    step = json.loads(members["step.json"])
    del step["episodes"]["reward_components"]["tests.golden.test_rise:counted"][1:]  # shorter than the other columns
    with zipfile.ZipFile(shard, "w") as archive:
        for one, data in (members | {"step.json": json.dumps(step).encode()}).items():
            archive.writestr(one, data)
    with pytest.raises(LmgymError, match=r"traces of step 3 are damaged \(IndexError\)"):
        explain_run(folder)
