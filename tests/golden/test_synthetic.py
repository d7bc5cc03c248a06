"""Numbers that the rewards of the synthetic tasks must give; "case" as in test_rewards.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.rewards.building import build_rewards
from lmgym.rewards.text.synthetic import dates, increasing_numbers
from lmgym.tasks.base import load_task
from lmgym.types import Example

OPEN = Example("open/0", "7")


# Case 10, computed with RL4LMs' reward increasing_numbers(min_tokens=20).
@pytest.mark.parametrize(
    ("text", "reward"), [("1 2 3 4 5", 0.5), ("1 2 2 3", 0.2), ("a b 7 8 c", 0.2), ("3 1 2", 0.1), ("no", 0.0)]
)
def test_increasing_numbers_is_that_of_rl4lms(text: str, reward: float) -> None:
    assert increasing_numbers([text], [OPEN]) == pytest.approx([reward], abs=1e-12)


# By hand from the definition: run / max(tokens, min_tokens / 2).
@pytest.mark.parametrize(
    ("text", "min_tokens", "reward"),
    [
        ("", 20, 0.0),
        (" ".join(map(str, range(10))), 20, 1.0),  # half of min_tokens is enough
        (" ".join(map(str, range(20))), 20, 1.0),
        (" ".join(map(str, range(20))) + " word" * 20, 20, 0.5),  # words count among the tokens
        (" ".join(map(str, range(10))) + " 0" + " 99" * 9, 20, 0.5),  # what comes after the run counts too
        ("1 2 3", 5, 1.0),  # 3 / max(3, 2.5)
        ("1 2", 5, 0.8),  # 2 / 2.5
        ("-1.5 2e0 03 4. 4.5", 2, 1.0),
        ("1, 2, 3", 2, 1 / 3),  # "1," is a word: only the last token is a number
        ("123", 2, 1.0),
        ("9 10", 2, 1.0),  # numbers, not texts, are compared
        ("nan 1 2", 2, 2 / 3),
        ("inf 1 -infinity 2", 2, 0.5),
    ],
)
def test_increasing_numbers_by_hand(text: str, min_tokens: int, reward: float) -> None:
    assert increasing_numbers([text], [OPEN], min_tokens=min_tokens) == pytest.approx([reward], abs=1e-12)


def test_increasing_numbers_refuses_no_tokens() -> None:
    with pytest.raises(LmgymError, match=r"rewards.increasing_numbers.min_tokens' must be at least 1, not 0"):
        increasing_numbers(["1"], [OPEN], min_tokens=0)
    with pytest.raises(LmgymError, match=r"unknown key 'rewards.increasing_numbers.min_token'"):
        build_rewards({"increasing_numbers": {"min_token": 20}})


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.integers(1, 40))
def test_one_is_earned_by_increasing_numbers_only(numbers: list[int], min_tokens: int) -> None:
    (reward,) = increasing_numbers([" ".join(map(str, numbers))], [OPEN], min_tokens=min_tokens)
    increasing = numbers == sorted(set(numbers))
    assert 0.0 < reward <= 1.0
    assert (reward == 1.0) == (increasing and len(numbers) >= min_tokens / 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It rained on 2021-03-04.", 1.0),
        ("2021-03-04 and 2022-01-01", 1.0),
        ("9999-99-99", 1.0),  # the form only, as in RL4LMs
        ("a12021-03-041", 1.0),
        ("2021-3-4", 0.0),
        ("21-03-04", 0.0),
        ("2021/03/04", 0.0),
        ("4 March 2021", 0.0),
        ("", 0.0),
    ],
)
def test_dates_are_four_two_and_two_digits(text: str, found: float) -> None:
    assert dates([text], [OPEN]) == [found]


def test_the_prompts_of_increasing_numbers_are_split_by_their_remainder() -> None:
    prompts = {
        split: [int(str(example.prompt)) for example in load_task("increasing_numbers", split)]
        for split in ("train", "validation", "test")
    }
    assert [len(set(numbers)) for numbers in prompts.values()] == [30, 10, 10]
    assert sorted(set().union(*prompts.values())) == list(range(50))
    assert prompts["test"][:12] == [4, 9, 14, 19, 24, 29, 34, 39, 44, 49, 4, 9]
    assert all(len(numbers) == 100 for numbers in prompts.values())


@pytest.mark.parametrize("task", ["increasing_numbers", "sentences_with_dates"])
def test_a_synthetic_task_takes_one_prompt_for_all_as_the_dummy_pool_of_rl4lms(task: str) -> None:
    for split in ("train", "test"):
        examples = load_task(task, split, prompt="<|endoftext|>", size=3)
        assert examples == [Example(f"{task}/{split}/{index}", "<|endoftext|>") for index in range(3)]
    assert load_task(task, "train", size=3) == load_task(task, "train", size=200)[:3]
    with pytest.raises(LmgymError, match=r"task.size must be at least 1, not 0"):
        load_task(task, "train", size=0)
    with pytest.raises(LmgymError, match="is empty"):
        load_task(task, "train", prompt="")


def test_no_opening_has_a_date_already() -> None:
    openings = [
        str(e.prompt) for split in ("train", "validation", "test") for e in load_task("sentences_with_dates", split)
    ]
    assert len(set(openings)) == 23 and dates(openings, [OPEN] * len(openings)) == [0.0] * len(openings)
    assert all(opening == opening.strip() for opening in openings)  # the answer brings the space before its first word
