"""What must hold for any number and any text."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.rewards.maths.final_answer import (
    answer_format,
    extract_answer,
    final_answer,
    normalise_number,
    reference_answer,
    same_answer,
)
from lmgym.rewards.text.form import length, lexical_richness, split_words, type_token_ratio
from lmgym.types import Example

SENTENCES: list[Callable[[str], str]] = [
    lambda number: f"#### {number}",
    lambda number: f"First 7, then 8.\n#### {number}\n",
    lambda number: f"The answer is: {number}.",
    lambda number: f"the answer is {number}",
    lambda number: f"\\boxed{{{number}}}",
    lambda number: f"Since 3 < 4, we get $\\boxed{{{number}}}$.",
    lambda number: f"A: {number}",
    lambda number: f"**Answer:** {number} dollars",
    lambda number: f"Answer: 3 + 4 = {number}",
    lambda number: f"\\boxed{{17}} was wrong; the answer is {number}%<|eot_id|>",
]
LOOSE: list[Callable[[str], str]] = [
    str,
    lambda number: f"Of 12 there are {number} left.",
    lambda number: f"7 * 8 = {number}</s>",
]

whole_numbers = st.builds(Fraction, st.integers(-(10**9), 10**9))
decimals = whole_numbers | st.builds(Fraction, st.integers(-(10**12), 10**12), st.sampled_from([10, 100, 1000]))
pieces = [*"0123456789.,/-+$%#\\{}()[]<>|:=eExA*\n\t ", "\u2212", "\u0663", "\uff18", "\u00bd", "\ud800"]
pieces += ["The answer is", "Answer:", "\nA:", "\\boxed{", "\\frac{", "####", "<|eot_id|>", " dollars"]
hostile = st.text(max_size=200) | st.lists(st.sampled_from(pieces), max_size=60).map("".join)


def written(value: Fraction) -> str:
    """A decimal fraction with as many places as it needs, by integer arithmetic only."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(value * 10**places).numerator).rjust(places + 1, "0")
    return ("-" if value < 0 else "") + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def with_commas(number: str) -> str:
    whole, point, rest = number.partition(".")
    return f"{int(whole):,}" + point + rest if whole != "-0" else number


FORMS: list[Callable[[str], str]] = [
    str,
    with_commas,
    lambda number: number + ("0" if "." in number else ".0"),
    lambda number: number + ("00" if "." in number else ".00"),
    lambda number: "-$" + number[1:] if number.startswith("-") else "$" + number,
    lambda number: "$" + with_commas(number),
    lambda number: "\u2212" + number[1:] if number.startswith("-") else number,
]


@given(decimals, st.sampled_from(FORMS), st.sampled_from(FORMS), st.sampled_from(SENTENCES), st.booleans())
def test_final_answer_does_not_depend_on_how_the_number_is_written(value, form, other, sentence, strict) -> None:
    text, reference = sentence(form(written(value))), sentence(other(written(value)))
    for wanted in (reference, other(written(value))):
        assert final_answer([text], [Example("a/0", "?", (wanted,))], strict=strict) == [1.0]
    assert answer_format([text], []) == [1.0]


@given(decimals, decimals, st.sampled_from(FORMS), st.sampled_from(SENTENCES + LOOSE))
def test_another_number_is_another_answer(value, other, form, sentence) -> None:
    example = Example("a/0", "?", (written(other),))
    assert final_answer([sentence(form(written(value)))], [example]) == [float(value == other)]


@given(decimals, st.sampled_from(FORMS), st.sampled_from(LOOSE))
def test_a_number_that_is_not_announced_counts_unless_strict(value, form, sentence) -> None:
    text, example = sentence(form(written(value))), Example("a/0", "?", (written(value),))
    assert final_answer([text], [example]) == [1.0]
    assert final_answer([text], [example], strict=True) == [0.0]


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 50))
def test_fractions_are_compared_as_fractions(top, bottom, factor) -> None:
    assert normalise_number(f"{top}/{bottom}") == Fraction(top, bottom)
    assert same_answer(f"{top}/{bottom}", f"{top * factor}/{bottom * factor}")
    assert extract_answer(f"\\boxed{{\\frac{{{top}}}{{{bottom}}}}}", strict=True) == f"{top}/{bottom}"


@given(hostile)
def test_no_text_raises_and_a_text_is_its_own_answer(text) -> None:
    assert extract_answer(text, strict=True) in (None, extract_answer(text))
    normalise_number(text)
    example = Example("a/0", "?", (text,))
    if same_answer(reference_answer(text), ""):
        with pytest.raises(LmgymError, match="an empty answer would be right"):
            final_answer([text], [example])
    else:
        assert final_answer([text, ""], [example] * 2) in ([0.0, 0.0], [1.0, 0.0])
    if extract_answer(text, strict=True) is not None:
        assert final_answer([text], [example], strict=True) == [1.0]
    values = lexical_richness([text], [example], brevity_scale=0.5) + length([text], [example])
    assert all(-0.5 <= value <= 1.0 for value in values)


@given(st.text(max_size=60), st.integers(1, 40))
def test_repeating_a_text_lowers_its_type_token_ratio_accordingly(text, times) -> None:
    example = Example("a/0", "?")
    once = type_token_ratio([text], [example])[0]
    assert abs(type_token_ratio([f"{text} " * times], [example])[0] - once / times) < 1e-12
    assert split_words(f"{text} " * times) == split_words(text) * times


@pytest.mark.slow
def test_a_megabyte_of_anything_is_read() -> None:
    million = 1_000_000
    for text in (
        "9" * million,
        "1,111" + ",111" * (million // 4) + ",1111",
        "answer: " * (million // 8),
        "#### " * (million // 5),
        "\\boxed{" * (million // 14) + "}" * (million // 14),
        "\\frac{1}{" * (million // 9),
        "18 " + "ab" * (million // 2) + "!x",
        "answer is" + " " * million + "x",
    ):
        extract_answer(text)
        normalise_number(text)
