"""The given answers that benchmarks/given_answers.py trains on: right ones are right, wrong ones are wrong."""

import pytest

from benchmarks import given_answers
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
