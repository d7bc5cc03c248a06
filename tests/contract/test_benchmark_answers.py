"""What benchmarks compute from given answers and given curves: right ones are right, wrong ones are wrong."""

import math

import pytest

from benchmarks import given_answers, published
from lmgym.rewards.maths.final_answer import final_answer
from lmgym.tasks.base import load_task


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_better_answer_of_a_pair_is_right_and_the_other_wrong(split: str) -> None:
    examples = given_answers.pairs(split)
    for place, expected in ((0, 1.0), (1, 0.0)):
        texts = [example.rated[place].text for example in examples]
        assert set(final_answer(texts, examples)) == {expected}
    own_sum = [given_answers.wrong(example)[2] for example in examples]
    assert 0.4 < sum(own_sum) / len(own_sum) < 0.7  # both kinds of mistakes


def test_a_step_is_right_if_it_goes_on_with_the_right_answer() -> None:
    for example in given_answers.steps("validation"):
        first, second = example.steps
        whole, result = example.references[0].strip().split("=")
        assert (first.right, second.right) == (first.text == whole, second.text == f"={result}")


def test_no_problem_of_the_warm_start_is_among_them() -> None:
    seen = load_task("arithmetic", "train", size=100, largest=50, explain="sums", held_out="numbers")
    assert not {one.prompt for one in seen} & {one.prompt for one in given_answers.marks("train")}


def test_a_published_curve_and_yours() -> None:
    """The last third of the steps in common; 1.96 sqrt(2 * .5 * .5 / 1250) = .0392 for the questions, and with two runs
    Student's t of their spread: .02 / sqrt(2) standard deviations of 12.7 / sqrt(2) (tables of t, 1 degree)."""
    theirs = published.Published("", "accuracy", "test", 1250, {0: 0.0, 10: 0.3, 20: 0.5, 30: 0.9})
    one, other = {0: 0.0, 10: 0.9, 20: 0.6}, {0: 0.1, 10: 0.1, 20: 0.62}
    last, found = published.difference(theirs, [one])
    assert last == [20] and (found.mean, found.high - found.mean) == pytest.approx((0.1, 0.0392), abs=1e-4)
    _, found = published.difference(theirs, [one, other])
    assert (found.mean, found.mean - found.low) == pytest.approx((0.11, math.hypot(0.0392, 0.12706)), abs=1e-4)
    assert "above" in published.verdict(theirs, [one]) and "0.139 is ruled out" in published.verdict(theirs, [one])
    assert "no difference is seen" in published.verdict(theirs, [one, other])
    assert "above" in published.verdict(theirs, [one, one])  # equal runs say nothing of their spread
    with pytest.raises(SystemExit, match="no step in common"):
        published.difference(theirs, [{7: 0.1}])


def test_published_curves_are_whole() -> None:
    curve = published.CURVES["verl_gsm8k_ppo"].points
    assert len(curve) == 45 and (curve[20], curve[350], max(curve.values())) == (0.176, 0.579, 0.579)
