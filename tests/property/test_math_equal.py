"""What must hold of `math_equal` for any numbers, answers and texts. Everything runs in this process."""

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.rewards.maths.answers import DEEPEST, candidates, reference_of
from lmgym.rewards.maths.comparison import easily_equal, equal, parts
from lmgym.rewards.maths.final_answer import LONGEST
from lmgym.text.latex import depth, spelling, tidied
from tests.property.hostile_answers import hostile
from tests.property.test_rewards import decimals, with_commas, written

FORMS: list[Callable[[str], str]] = [
    str,
    with_commas,
    lambda number: with_commas(number).replace(",", r"{,}"),
    lambda number: with_commas(number).replace(",", r",\!"),
    lambda number: with_commas(number).replace(",", r",\! "),
    lambda number: with_commas(number).replace(",", r"\,"),
    lambda number: with_commas(number).replace(",", " "),
    lambda number: number.replace("0.", ".", 1) if number.lstrip("-").startswith("0.") else number,
    lambda number: number + (".0" if "." not in number else "0"),
    lambda number: rf"\text{{{number}}}",
    lambda number: rf"{number} \text {{ units}}",
    lambda number: rf"{number}\,",
    lambda number: rf"\; {number} \;",
    lambda number: f"$ {number} $",
    lambda number: f"{number}.",
]
FRAMES: list[Callable[[str], str]] = [
    lambda answer: rf"\boxed{{{answer}}}",
    lambda answer: f"The answer is $ {answer} $.",
    lambda answer: f"Final Answer: The largest $n$ is ${answer}$.",
    lambda answer: rf"\boxed{{no}}, so $x = \boxed{{ {answer} }}$",
    lambda answer: rf"Answer: \[ {answer} \]",
]
numbers = st.builds(Fraction, st.integers(-999, 999), st.sampled_from([100, 1000])) | decimals
fractions = st.builds(Fraction, st.integers(-999, 999), st.integers(1, 999))
expressions = st.recursive(
    st.sampled_from(["x", "y", "2", "7", ".5", r"\pi", r"\sqrt3"]),
    lambda inner: (
        st.builds("({}+{})".format, inner, inner)
        | st.builds(r"\frac{{{}}}{{1+{}^2}}".format, inner, inner)
        | st.builds("{} {}".format, inner, st.sampled_from(["x", r"\sqrt{5}"]))
    ),
    max_leaves=3,
)
answers = st.one_of(
    expressions,
    st.builds(r"\{{ {}, {} \}}".format, expressions, expressions),
    st.builds("({}, {}]".format, fractions, expressions),
    st.builds(r"x = {}, y = {}".format, fractions, decimals.map(written)),
    st.builds(r"\text{{{}}} \text{{ and }} {}".format, st.sampled_from("ABC"), fractions),
)


def same(answer: str, right: str) -> bool:
    """What the reward says of two answers, without its processes."""
    one, other = tidied(answer), tidied(right)
    easy = easily_equal(one, other)
    return equal(one, other) if easy is None else easy


@given(numbers, st.sampled_from(FORMS))
def test_a_number_is_itself_in_every_spelling(value: Fraction, other) -> None:
    for form in FORMS:
        assert easily_equal(tidied(form(written(value))), tidied(other(written(value)))) is True


@given(numbers, numbers, st.sampled_from(FORMS))
def test_another_number_is_never_equal(value: Fraction, off: Fraction, other) -> None:
    """These have three decimals at most, so comparing six of them tells them apart."""
    for form in FORMS:
        found = easily_equal(tidied(form(written(value))), tidied(other(written(value + off))))
        assert found is (off == 0)


@given(fractions, fractions)
def test_fractions_are_compared_exactly(one: Fraction, other: Fraction) -> None:
    latex = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    plain = [f"{value.numerator}/{value.denominator}" for value in (one, other)]
    assert easily_equal(tidied(latex[0]), tidied(plain[1])) is (one == other)
    assert easily_equal(tidied(plain[0]), tidied(latex[1])) is (one == other)


@given(numbers, st.integers(1, 9))
def test_only_a_percent_sign_scales_by_a_hundred(value: Fraction, factor: int) -> None:
    percent, plain = tidied(written(value) + r"\%"), written(value)
    assert easily_equal(percent, plain) is True
    assert easily_equal(percent, written(value / 100)) is True
    assert easily_equal(plain, written(value / 100)) is (value == 0)
    assert easily_equal(percent, written(value / 100 + factor)) is (written(value / 100 + factor) == plain)


@given(numbers, st.sampled_from(FRAMES))
def test_the_answer_is_found_in_every_frame(value: Fraction, frame) -> None:
    for form in FORMS[:9]:
        text = frame(form(written(value)))
        found = [tidied(one) for one in candidates(text, strict=True)]
        assert any(easily_equal(one, written(value)) for one in found), (text, found)
        assert easily_equal(tidied(reference_of(text)), written(value)), reference_of(text)


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True), st.randoms())
def test_linked_boxes_formulas_and_lists_are_one_list(values, source) -> None:
    pytest.importorskip("math_verify")
    ordered = [str(value) for value in values]
    shuffled = source.sample(ordered, len(ordered))
    for text in (
        " and ".join(rf"\boxed{{{number}}}" for number in shuffled),
        "The answer is " + " or ".join(f"${number}$" for number in shuffled) + ".",
        "Answer: " + ", ".join(shuffled[:-1]) + " and " + shuffled[-1],
    ):
        found = tidied(candidates(text, strict=True)[0])
        assert sorted(parts(found)) == sorted(ordered)
        assert equal(found, ", ".join(ordered)) and not equal(found, ", ".join(ordered[1:]))


@settings(max_examples=40)
@given(answers)
def test_an_answer_equals_itself_also_by_algebra(answer: str) -> None:
    pytest.importorskip("math_verify")
    assert same(answer, answer)
    assert equal(tidied(answer), tidied(answer))
    assert tidied(tidied(answer)) == tidied(answer)


@settings(max_examples=40)
@given(answers, answers)
def test_two_answers_are_equal_in_both_directions(one: str, other: str) -> None:
    """An equation beside an expression is left out: x + y = 5 has the value 5, but 5 is no equation."""
    pytest.importorskip("math_verify")
    assert same(one, other) == same(other, one)


@settings(max_examples=40)
@given(answers, st.sampled_from([r"\,", r"\;", r"\!", r"\ ", "~", r"\quad ", " ", r"\left", "  "]))
def test_latex_spacing_means_nothing(answer: str, space: str) -> None:
    """At the end, and before each operator or bracket."""
    mark = "(" if space == r"\left" else "+"
    spaced = answer.replace(mark, space + mark) + (space if space != r"\left" else "")
    assert spelling(tidied(spaced)) == spelling(tidied(answer))


@settings(max_examples=40)
@given(fractions, fractions, expressions)
def test_adding_a_number_changes_an_expression(first: Fraction, second: Fraction, expression: str) -> None:
    pytest.importorskip("math_verify")
    one, other = (rf"{expression} + \frac{{{value.numerator}}}{{{value.denominator}}}" for value in (first, second))
    assert same(one, other) == (first == second)


PIECES = (
    "$", "$ ", "$$", r"\[", r"\(", r"\boxed{", r"\boxed{1} and ", "answer: ", "answer is $x$ is ", "is ", "1 ", "1,",
    "1 000 ", "a", "and ", "or ", r"\text {", "(", "sqrt(", "^(", "**", "\\", r"\,", r"\frac", "%", "{", "}", ";", "=",
    " ", "\n", "A. ", "!", ".5", r"\begin{array}", "Answer: $1$ and ", "####", "\u221a", r"x\le ",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("end", ["", "x", r"\boxed{5}", " 5"])
def test_no_text_of_ten_thousand_characters_takes_long(piece: str, end: str) -> None:
    """Ten seconds are a limit against hangs: a search that is quadratic in 10,000 characters would take minutes."""
    text = piece * (10_000 // len(piece)) + end
    began = time.perf_counter()
    found = [tidied(one) for one in candidates(text, strict=False)] + [tidied(reference_of(text))]
    for answer in found:
        assert easily_equal(answer[:1_000], answer[:1_000])
        parts(answer[:1_000])
    assert time.perf_counter() - began < 10


def test_hostile_texts_do_not_raise_and_their_answers_are_bounded() -> None:
    for text, right in hostile(0, 400):
        reference_of(text)
        for answer in candidates(text, strict=False):
            assert 0 < len(answer) <= LONGEST and depth(answer) <= DEEPEST
            one, other = tidied(answer), tidied(right)
            assert easily_equal(one, other) is easily_equal(other, one)
