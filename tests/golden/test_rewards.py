"""Numbers that the rewards must give. "Case" numbers those of a study of the systems whose behaviour is matched."""

import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.maths.final_answer import (
    answer_format,
    extract_answer,
    final_answer,
    normalise_number,
    reference_answer,
    same_answer,
)
from lmgym.rewards.text.form import (
    exact_match,
    length,
    lexical_richness,
    regex,
    split_words,
    type_token_ratio,
    words,
)
from lmgym.types import Example

OPEN = Example("open/0", "Write about 100 words: rain")


def scored(text: str, *references: str, strict: bool = False) -> float:
    return final_answer([text], [Example("a/0", "How many?", references)], strict=strict)[0]


# Case 14, computed by running NanoRL: type-token ratio, brevity penalty for 80 words, reward with scale 0.5.
@pytest.mark.parametrize(
    ("text", "ratio", "brevity", "reward"),
    [
        ("The cat sat on the mat.", 0.833333, 0.925, 0.370833),
        ("Don't stop, don't STOP!", 0.5, 0.95, 0.025),
        ("", 0.0, 1.0, -0.5),
        ("123 456", 0.0, 1.0, -0.5),
    ],
)
def test_lexical_richness_is_that_of_nanorl(text: str, ratio: float, brevity: float, reward: float) -> None:
    assert type_token_ratio([text], [OPEN]) == pytest.approx([ratio], abs=1e-6)
    assert lexical_richness([text], [OPEN]) == pytest.approx([ratio], abs=1e-6)
    assert lexical_richness([text], [OPEN], brevity_scale=1.0) == pytest.approx([ratio - brevity], abs=1e-6)
    assert lexical_richness([text], [OPEN], brevity_scale=0.5) == pytest.approx([reward], abs=1e-6)


def test_a_long_text_pays_no_brevity_penalty() -> None:
    assert lexical_richness(["one two " * 40], [OPEN], brevity_scale=0.5) == [2 / 80]
    assert lexical_richness(["one two " * 39], [OPEN], brevity_scale=0.5) == pytest.approx([2 / 78 - 0.5 * 2 / 80])


# Case 21: what LLM_RL extracts; the last two are its bugs ("8", and "18.0" unlike "18"), here as they should be.
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is: 1,234.", "1234"),
        ("...$18<|eot_id|>", "18"),
        (r"\boxed{42}.", "42"),
        ("The answer is 18", "18"),
    ],
)
def test_answers_are_extracted_as_in_llm_rl(text: str, answer: str) -> None:
    assert extract_answer(text) == answer
    assert scored(text, answer) == scored(text, f"6 * 3 = 18, say.\n#### {answer}") == 1.0


def test_trailing_zeros_do_not_matter() -> None:
    assert scored("The answer is 18.0", "18") == scored("#### 18", "18.00") == scored("18.0", "#### 18") == 1.0


# Case 23: braces may be nested, and a box that is never closed does not count.
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}", "1/2"),
        (r"so \boxed{\sqrt{\frac{a}{b}}}", r"\sqrt{\frac{a}{b}}"),
        (r"first \boxed{4}, then \boxed{5", "4"),
        (r"\fbox{7}", "7"),
        (r"\boxed{3}, checked twice, so \boxed{4}.", "4"),
    ],
)
def test_boxes(text: str, answer: str) -> None:
    assert extract_answer(text, strict=True) == answer


@pytest.mark.parametrize(
    "text",
    [
        "3 * 6 = 18\n#### 18",
        "####18",
        "The answer is: 18",
        "the answer is 18",
        "So the final answer is **18**.",
        "**Answer:** 18",
        "THE ANSWER IS 18!",
        "The answer is:\n\n18",
        "The answer is $\\boxed{18}$.",
        "\\boxed{18 \\text{ dollars}}",
        "\\boxed{\\$18.00}",
        "A: 18",
        "Q: 9 + 9?\nA: 18",
        "Answer: 18 dollars and no more than 20",
        "The answer is 18%.",
        "The answer is \\(18\\).",
        "The answer is 9 + 9 = 18.",
        "The answer is x = 18",
        "The answer is that Tom has 18 apples.",
        "The answer is 5. No: the answer is 18.",
        "\\boxed{18}. We check: 9 + 9 works, so the answer is correct",
        "#### 18 km/h",
        "Answer: 18kg",
    ],
)
def test_announced_answers_count_strictly(text: str) -> None:
    assert extract_answer(text, strict=True) in ("18", "18.00")
    assert scored(text, "18", strict=True) == 1.0
    assert scored(text, "19", strict=True) == 0.0
    assert answer_format([text], [OPEN]) == [1.0]


@pytest.mark.parametrize("text", ["18", "That makes 18.", "He pays 3 * $6 = $18</s>", "3 and then 18", "x is 18?"])
def test_the_last_number_counts_unless_strict(text: str) -> None:
    assert extract_answer(text) == "18"
    assert extract_answer(text, strict=True) is None
    assert scored(text, "#### 18") == 1.0
    assert scored(text, "#### 18", strict=True) == 0.0
    assert answer_format([text], [OPEN]) == [0.0]


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        ("The answer is 1/2", "0.5", 1.0),
        ("The answer is 1 1/2", "1.5", 1.0),
        ("\\boxed{-\\frac{3}{4}}", "-0.75", 1.0),
        ("The answer is -5", "5", 0.0),
        ("10-3", "3", 1.0),  # a minus between two numbers is no sign
        ("The answer is -$5.", "-5", 1.0),
        ("The answer is \u22125.", "-5", 1.0),
        ("The answer is 1,234", "1234", 1.0),
        ("The answer is 12,34", "1234", 0.0),  # not a thousands separator
        ("The answer is 3.14", "3", 0.0),
        ("The answer is 5x", "5", 0.0),
        ("The answer is 2:30", "2:30", 1.0),
        ("The answer is 2:30", "2", 0.0),
        ("\\boxed{3\\sqrt{2}}", "3", 0.0),
        ("\\boxed{x+1}", "x + 1", 1.0),
        ("\\boxed{y+1}", "x+1", 0.0),
        ("The answer is Paris.", "paris", 1.0),
        ("Paris", "Paris.", 1.0),
        ("The answer is (B)", "B", 1.0),
        ("The answer is London", "Paris", 0.0),
        ("\\boxed{(3,4)}", "(3, 4)", 1.0),
        ("18 apples, but the answer is unknown", "18", 0.0),
        ("The answer is 1e3", "1000", 1.0),
        ("The answer is $2.5 million.", "2,500,000", 1.0),
        ("The answer is 18 thousand", "18", 0.0),
        ("18 Hundred", "1800", 1.0),
        ("The answer is 5 millionaires", "5", 1.0),
        ("#### 18\nMillion thanks", "18", 1.0),  # a new line is a new thought
        ("The answer is 2e3 million", "2000", 1.0),  # not both
        ("", "18", 0.0),
    ],
)
def test_numbers_are_compared_exactly_and_texts_as_texts(text: str, reference: str, value: float) -> None:
    assert scored(text, reference) == value


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        # An expression or a list is not its first number.
        ("2\u03c0.", "2\u03c0"),
        ("2\u03c0. It follows that 3 is less.", "2\u03c0"),
        ("3 pi", "3 pi"),
        ("2\u221a3", "2\u221a3"),
        ("2 sqrt(3).", "2 sqrt(3)"),
        ("2 + sqrt(3)", "2 + sqrt(3)"),
        ("5\u00b2", "5\u00b2"),
        ("1\u00bd", "1\u00bd"),
        ("3 \u00d7 10^8", "3 \u00d7 10^8"),
        ("3 x 10^8", "3 x 10^8"),
        ("3+4i", "3+4i"),
        ("3 + x", "3 + x"),
        ("2/x", "2/x"),
        ("10 / 3.", "10 / 3"),
        ("10 - 4", "10 - 4"),
        ("18-20", "18-20"),
        ("5 \u00b1 2", "5 \u00b1 2"),
        ("1,5", "1,5"),
        ("6/7/2024", "6/7/2024"),
        (r"0.\overline{3}", r"0.\overline{3}"),
        ("2 and 3. Both fit.", "2 and 3"),
        ("1, 2 or 3", "1, 2 or 3"),
        ("y=2, x=1", "y=2, x=1"),
        # An equation says what it comes to, also with an x between its numbers.
        ("2 x 3 = 6.", "6"),
        ("$5 x 3 = $15", "15"),
        ("4 x (2 + 3) = 20 cm", "20"),
        ("2x = 6", "2x = 6"),
        ("2 + 3x = 9", "2 + 3x = 9"),
        # Words behind a number are none.
        ("18 - that is all", "18"),
        ("*18* (5 + 13).", "18"),
        ("6 - A.", "6"),
        ("30 - C is wrong", "30"),
        # One number in two forms is no list.
        ("3/4 or 0.75", "3/4"),
        ("18, 18.0", "18"),
        ("18 - a lot", "18"),
        ("18 - (see above)", "18"),
        ("18 - ... well", "18"),
        ("**18** - 3 are left", "18"),
        ("18-year-old wine", "18"),
        ("$18/hour", "18"),
        ("18/h", "18"),
        ("18 piles", "18"),
        ("18, 3 more than 15", "18"),
        ("1,234", "1234"),
        ("18. Then 3 are left", "18"),
    ],
)
def test_an_announced_answer_is_read_to_its_end(content: str, answer: str) -> None:
    for text in (f"#### {content}", f"The answer is {content}", f"Answer: {content}"):
        assert extract_answer(text, strict=True) == answer


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("2 and 3", "2 and 3"),
        ("x = 5 or x = -5", "x = 5 or x = -5"),
        ("1, 2, and 3.", "1, 2, and 3"),
        ("4 out of 5", "4 out of 5"),
        ("5 mod 7", "5 mod 7"),
        ("log 5", "log 5"),
        ("sin x + 2", "sin x + 2"),
        ("3 pi", "3 pi"),
        ("3 hours 20 minutes", "3 hours 20 minutes"),
        ("He has 18.", "18"),
        ("Tom has 3 and Ann 18", "18"),
        ("half of 36 is 18", "18"),
        ("he gets 18", "18"),
        ("18 apples and no more", "18"),
        ("so 9+9=18", "18"),
        ("9 + 9 = 18", "18"),
        ("half of 36\n18", "18"),
    ],
)
def test_a_bare_reference_is_no_worked_solution(reference: str, answer: str) -> None:
    assert reference_answer(reference) == answer
    right, last = f"#### {answer}", answer.split()[-1]
    assert scored(right, reference) == 1.0
    assert scored(f"#### {last}", reference) == float(last == answer)


def test_any_reference_will_do() -> None:
    assert scored("#### 4", "#### 3", "2 + 2 = 4\n#### 4") == 1.0
    assert scored("#### 5", "#### 3", "2 + 2 = 4\n#### 4") == 0.0


def test_numbers() -> None:
    assert normalise_number("$1,234.50") == 1234.5
    assert normalise_number("18 dollars.") == normalise_number("18%") == 18
    assert normalise_number(".5") == normalise_number("1/2") == normalise_number("5e-1")
    assert normalise_number("3/0") is normalise_number("18 19") is normalise_number("eighteen") is None
    assert normalise_number("1e-0009") == normalise_number(".000000001")
    assert normalise_number("1e1000") is normalise_number("1e-1000") is normalise_number("3 pi") is None
    assert normalise_number("1e999999999") is normalise_number("9" * 5000) is None
    assert same_answer("1e999999999", "1E999999999") and not same_answer("1e999999999", "1e999999998")


# Worked by hand.
def test_words_and_length() -> None:
    text = "It's  caf\u00e9-time, it's 9 o'clock."
    assert split_words(text) == ["it's", "caf", "time", "it's", "o'clock"]
    assert split_words(text, "unicode") == ["it's", "caf\u00e9", "time", "it's", "o'clock"]
    assert words([text, ""], [OPEN, OPEN]) == [5.0, 0.0]
    assert type_token_ratio(["\u00e9\u00e9 \u00e9\u00e9"], [OPEN], letters="unicode") == [0.5]
    assert length([text, "", "a " * 8, "a " * 9], [OPEN] * 4, target=4) == [0.75, 0.0, 0.0, 0.0]
    assert length(["abc", "abcdef"], [OPEN] * 2, target=4, unit="characters") == [0.75, 0.5]


def test_patterns_and_exact_matches() -> None:
    assert regex(["x 12", "12", "x"], [OPEN] * 3, pattern="[0-9]+") == [1.0, 1.0, 0.0]
    assert regex(["x 12", "12", "x"], [OPEN] * 3, pattern="[0-9]+", full=True) == [0.0, 1.0, 0.0]
    example = Example("a/0", "7+5=", references=(" 12", "twelve"))
    assert exact_match(["12\n", " twelve", "12.", ""], [example] * 4) == [1.0, 1.0, 0.0, 0.0]


# Case 12, computed by running RL4LMs' diversity metrics (GEM): distinct-1 of a corpus is the ratio over all its words.
def test_type_token_ratio_is_distinct_1() -> None:
    assert type_token_ratio(["the cat sat the cat ran"], [OPEN]) == [pytest.approx(0.66667, abs=5e-6)]


@pytest.mark.parametrize("name", ["final_answer", "exact_match", "math_equal"])
@pytest.mark.parametrize("blank", ["", " \n", "####"])
def test_an_empty_reference_pays_no_empty_answer(name: str, blank: str) -> None:
    """Before a run, and while one goes on. "####" is an answer for exact_match, and no other reward."""
    reward, examples = registry.get("reward", name), [Example("a/0", "?", ("18", blank))]
    if name == "exact_match" and blank == "####":
        assert reward(["", blank], examples * 2) == [0.0, 1.0]
        return
    for call in (lambda: reward.check(examples), lambda: reward([""], examples)):
        with pytest.raises(LmgymError, match=r"'a/0' is empty|an empty answer would be right|cannot read"):
            call()


# verl/utils/reward_score/gsm8k.py, strict: the last "#### (-?[0-9.,]+)", without commas, as a text.
@pytest.mark.parametrize(
    ("text", "left", "value"),
    [
        ("9 + 9 = 18\n#### 18", "#### 18", 1.0),
        ("#### 17 no, #### 18 it is", "#### 18", 1.0),
        ("The answer is 18.", "", 0.0),
        (r"so \boxed{18}", "", 0.0),
        ("####18", "", 0.0),
        ("#### $18", "", 0.0),
        ("#### 1,8", "#### 1,8", 0.0),
        ("#### -18", "#### -18", 0.0),
    ],
)
def test_what_verls_strict_score_of_gsm8k_sees(text: str, left: str, value: float) -> None:
    changed = registry.get("post_processor", "hash_answer")(text)
    assert changed == left
    assert scored(changed, "9 + 9 = <<9+9=18>>18\n#### 18", strict=True) == value
